"""A target that is an object made of functions, built again once patches have changed them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .._python.layers import attribute_of
from .._python.loaded_modules import loaded_modules, names_of
from .target import ReplacedTarget


class RebuiltTarget(ReplacedTarget):
    """An object made of functions that patches change, such as a Ray actor class.

    `make` takes the original object and returns one made of the functions in place by then. Several patches may
    rebuild the same object; they share the latest build.
    """

    __slots__ = ("_make", "_shared")
    is_function = False

    def __init__(self, target: str, make: Callable[[Any], Any]) -> None:
        self.module, self.target = sys.modules[target.partition(":")[0]], target
        self.parent, self.attribute, self.original = self.find(self.module)
        self.inherited, self.holders, self._make = False, (), make
        self._was_alone = False
        shared = _shared_builds.get(target)
        if shared is None or shared.latest is not self.original:
            shared = _shared_builds[target] = _SharedBuild(self.original)
        self._shared = shared

    @property
    def replacement(self) -> Any:
        return self._shared.latest

    @property
    def after_revert(self) -> Any:
        return self._shared.latest if self._shared.users else self._shared.original

    @property
    def keepers(self) -> tuple[object, ...]:
        # Nothing uses what only earlier builds lead to, such as the wrappers that Ray makes of a class's methods.
        shared = self._shared
        earlier, in_use = _reachable(shared.original, self.original), _reachable(shared.latest)
        return (self, shared, *(part for key, part in earlier.items() if key not in in_use))

    @property
    def is_ours(self) -> bool:
        return self in self._shared.users

    def install(self) -> None:
        build = self._make(self._shared.original)
        self._shared.users.add(self)
        self._put(build)

    def revert(self) -> None:
        """Rebuild for the patches that remain, or put back the original. Call it when the site's functions are
        reverted."""
        shared = self._shared
        if self not in shared.users:
            return
        if vars(self.parent).get(self.attribute) is shared.latest:
            self._put(self._make(shared.original) if len(shared.users) > 1 else shared.original)
        shared.users.remove(self)

    def put_back(self, replacement: Any) -> None:
        # Not built again: the functions that it is made of may not be back yet, and others hold this build.
        self._shared.users.add(self)
        self._put(replacement)

    def _put(self, build: Any) -> None:
        before, self._shared.latest = self._shared.latest, build
        try:
            setattr(self.parent, self.attribute, build)
        except BaseException:
            self._shared.latest = before
            raise


class _SharedBuild:
    """An object that several patches rebuild: the original, the latest build, and the targets that use it."""

    __slots__ = ("latest", "original", "users")  # so that no dictionary holds the original

    def __init__(self, original: Any) -> None:
        self.original = self.latest = original
        self.users: set[RebuiltTarget] = set()


_shared_builds: dict[str, _SharedBuild] = {}


def _reachable(*builds: Any) -> dict[int, object]:
    """Return by id all that objects lead to, except modules and the classes found there by their names.

    A Ray actor class leads to a class that Ray has derived from the one in the module, and to its wrapped methods.
    """
    modules = {id(names) for _, names in loaded_modules()}
    found: dict[int, object] = {}
    todo = [*builds]
    while todo:
        part = todo.pop()
        if id(part) not in found and id(part) not in modules and not _is_in_a_module(part):
            found[id(part)] = part
            todo += gc.get_referents(part)
    return found


def _is_in_a_module(part: Any) -> bool:
    kind = type(part)  # isinstance would read __class__, and so load what is lazy
    if issubclass(kind, ModuleType):
        return True
    if not issubclass(kind, type):
        return False
    names = names_of(sys.modules.get(attribute_of(part, "__module__"))) or {}
    return names.get(part.__name__) is part
