"""One target of a site: found in the loaded module, put in, put back, and known again when it is gone.

What is installed is an ordinary function, never a wrapt proxy: torch.compile silently drops a proxy's body,
and a proxy cannot be pickled or deep-copied.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import wrapt

from ..patch import MARK
from .holders import Holder


class ReplacedTarget:
    """A function that has been replaced; make: takes the original and returns the one to install.

    target: ``"module:Class.attribute"``. inherited: whether there was nothing in the class itself, so that putting
    back deletes. holders: other places that held the original and were given the replacement.
    """

    __slots__ = ("attribute", "holders", "inherited", "module", "original", "parent", "replacement", "target")

    def __init__(self, patch_name: str, module: ModuleType, path: str, make: Callable[..., Any]) -> None:
        self.module, self.target = module, f"{module.__name__}:{path}"
        self.parent, self.attribute, self.original = self._find(self.module)
        self.inherited = self.attribute not in vars(self.parent)
        self.holders: tuple[Holder, ...] = ()
        self.replacement = self._made(patch_name, make)

    def _find(self, module: ModuleType) -> tuple[Any, str, Any]:
        """Parent, attribute and value, of what the module has now."""
        found: tuple[Any, str, Any] = wrapt.resolve_path(module, self.target.partition(":")[2])
        return found

    def _made(self, patch_name: str, make: Callable[..., Any]) -> Any:
        replacement = self._plain(make(self.original))
        setattr(replacement, MARK, patch_name)
        if self.inherited:  # pickle goes by these, and would find the parent's
            replacement.__module__ = self.parent.__module__
            replacement.__qualname__ = f"{self.parent.__qualname__}.{self.attribute}"
        return replacement

    def _plain(self, function: Any) -> FunctionType:
        if type(function) is not FunctionType:
            raise TypeError(
                f"the replacement for {self.target} is a {type(function).__name__}, not a plain function"
            )
        return function

    @property
    def current(self) -> Any:
        """What the module has at the target's path now (after a reload, in the new class); None for nothing."""
        return self.at(self.module)

    def at(self, module: ModuleType) -> Any:
        """What this module, or another one of its name, has at the target's path; None for nothing."""
        try:
            return self._find(module)[2]
        except AttributeError:
            return None

    @property
    def is_in_place(self) -> bool:
        return self.current is self.replacement

    @property
    def was_reloaded(self) -> bool:
        """Whether the module's own code is at the target anew, as after `importlib.reload`.

        Seen below decorators. What others have put around the old code, with or without us, is not new. In a class
        it is anew where the class is, whatever decorators make of it there.
        """
        if self.current is None:
            return False
        parent, attribute, _ = self._find(self.module)
        if isinstance(parent, type) and parent is not self.parent:
            return (parent.__module__, parent.__qualname__) == (self.parent.__module__, self.parent.__qualname__)
        if self.inherited and attribute not in vars(parent):
            return False
        code, old = inspect.unwrap(self.current), inspect.unwrap(self.original)
        return code is not old and getattr(code, "__globals__", None) is vars(self.module)

    @property
    def is_the_modules_own(self) -> bool:
        """Whether the original is code of the module, rather than imported into it."""
        return getattr(inspect.unwrap(self.original), "__globals__", None) is vars(self.module)

    def overwritten_by(self) -> str:
        """Who stands at the target instead of us, in words."""
        other = self.current
        if other is None:
            return "nothing"
        return f"{getattr(other, '__module__', '?')}.{getattr(other, '__qualname__', repr(other))}"

    def put_in(self) -> None:
        setattr(self.parent, self.attribute, self.replacement)

    @property
    def is_put_in(self) -> bool:
        """Whether what `put_in` put there is there still; it may be in a class that a reload has replaced."""
        return vars(self.parent).get(self.attribute) is self.replacement

    def put_back(self) -> None:
        """Undo `put_in`; nothing where it is undone, or someone else has put something there."""
        if not self.is_put_in:
            return
        if self.inherited:
            delattr(self.parent, self.attribute)
        else:
            setattr(self.parent, self.attribute, self.original)

    @property
    def beneath(self) -> Any:
        """What holders get in the replacement's stead once it has been put back; None for nothing."""
        return self.original

    @property
    def rebound(self) -> tuple[str, ...]:
        """The holders, as ``"module:name"``."""
        return tuple(one.where for one in self.holders)


class AddedTarget(ReplacedTarget):
    """A function where the class, or the module, had none of its own.

    name: where that function is, as ``"package.module:name"``. It stays what and where it is: a class that is
    pickled by value takes it along by its name, and who reads that imports megapatch.
    """

    __slots__ = ()

    def _find(self, module: ModuleType) -> tuple[Any, str, Any]:
        parent_path, _, attribute = self.target.partition(":")[2].rpartition(".")
        parent = wrapt.resolve_path(module, parent_path)[2] if parent_path else module
        return parent, attribute, vars(parent).get(attribute)

    def __init__(self, patch_name: str, module: ModuleType, path: str, name: str) -> None:
        super().__init__(patch_name, module, path, lambda original: wrapt.resolve_path(*name.split(":"))[2])

    def _made(self, patch_name: str, make: Callable[..., Any]) -> Any:
        if not self.inherited:
            raise TypeError(f"{self.target} is to be added, and is there already")
        function = self._plain(make(self.original))
        setattr(function, MARK, patch_name)
        return function

    @property
    def was_reloaded(self) -> bool:
        parent, attribute, _ = self._find(self.module)
        return parent is not self.parent and attribute not in vars(parent)


class RebuiltTarget(ReplacedTarget):
    """An object that was made of what patches change, such as a Ray actor class; make: takes the original and
    returns one made of what is in place by then.

    Several patches may have one made again: there is one for all of them, the latest.
    """

    __slots__ = ("_make", "_shared")

    def __init__(self, target: str, make: Callable[[Any], Any]) -> None:
        self.module, self.target = sys.modules[target.partition(":")[0]], target
        self.parent, self.attribute, self.original = self._find(self.module)
        self.inherited, self.holders, self._make = False, (), make
        shared = _rebuilt.get(target)
        if shared is None or shared.latest is not self.original:
            shared = _rebuilt[target] = _Shared(self.original)
        self._shared = shared

    @property
    def replacement(self) -> Any:
        return self._shared.latest

    @property
    def beneath(self) -> Any:
        return self._shared.latest if self._shared.users else self._shared.original

    @property
    def was_reloaded(self) -> bool:
        return False  # functions tell: of an object it cannot be seen who has made it

    @property
    def is_put_in(self) -> bool:
        return self in self._shared.users

    def put_in(self) -> None:
        made = self._make(self._shared.original)
        self._shared.users.add(self)
        self._put(made)

    def put_back(self) -> None:
        """Once for all: to be called when the functions of the site are back."""
        shared = self._shared
        if self not in shared.users:
            return
        if vars(self.parent).get(self.attribute) is shared.latest:
            self._put(self._make(shared.original) if len(shared.users) > 1 else shared.original)
        shared.users.remove(self)

    def _put(self, made: Any) -> None:
        before, self._shared.latest = self._shared.latest, made
        try:
            setattr(self.parent, self.attribute, made)
        except BaseException:
            self._shared.latest = before
            raise


class _Shared:
    """What is rebuilt for several patches: the original, the latest, and who wants it."""

    def __init__(self, original: Any) -> None:
        self.original = self.latest = original
        self.users: set[RebuiltTarget] = set()


_rebuilt: dict[str, _Shared] = {}
