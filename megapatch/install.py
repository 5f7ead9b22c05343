"""Changes a site's targets all or none, and undoes it.

What is installed is an ordinary function, never a wrapt proxy: torch.compile silently drops a proxy's body,
and a proxy cannot be pickled or deep-copied.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

import wrapt

from . import holders
from .patch import MARK, MegapatchError, Site


class RestoreError(MegapatchError):
    """A target could not be put back because someone has patched on top of megapatch."""


class Installed:
    """One target that has been replaced.

    target: ``"module:Class.attribute"``. rebound: other places, as ``"module:name"``, that held the original.
    """

    __slots__ = ("attribute", "inherited", "module", "original", "parent", "rebound", "replacement", "target")

    def __init__(self, patch_name: str, module: ModuleType, path: str, factory: Any) -> None:
        self.module, self.target = module, f"{module.__name__}:{path}"
        self.parent, self.attribute, self.original = wrapt.resolve_path(module, path)
        self.inherited = self.attribute not in vars(self.parent)
        self.rebound: tuple[str, ...] = ()
        replacement = factory(self.original)
        if type(replacement) is not FunctionType:
            raise TypeError(
                f"the replacement for {self.target} is a {type(replacement).__name__}, not a plain function"
            )
        setattr(replacement, MARK, patch_name)
        if self.inherited:  # pickle goes by these, and would find the parent's
            replacement.__module__ = self.parent.__module__
            replacement.__qualname__ = f"{self.parent.__qualname__}.{self.attribute}"
        self.replacement = replacement

    @property
    def current(self) -> Any:
        """What the module has at the target's path now (after a reload, in the new class); None for nothing."""
        try:
            return self._resolve()[2]
        except AttributeError:
            return None

    def _resolve(self) -> tuple[Any, str, Any]:
        """Parent, attribute and value, of what the module has now."""
        found: tuple[Any, str, Any] = wrapt.resolve_path(self.module, self.target.partition(":")[2])
        return found

    @property
    def is_in_place(self) -> bool:
        return self.current is self.replacement

    @property
    def was_reloaded(self) -> bool:
        """Whether the module's own code is at the target anew, as after `importlib.reload`.

        Seen below decorators. What others have put around the old code, with or without us, is not new. What was
        inherited, and is again, is anew where the class is.
        """
        if self.inherited and self.current is not None:
            parent, attribute, _ = self._resolve()
            if attribute not in vars(parent):
                return parent is not self.parent
        code, old = inspect.unwrap(self.current), inspect.unwrap(self.original)
        return code is not old and getattr(code, "__globals__", None) is vars(self.module)

    def overwritten_by(self) -> str:
        """Who stands at the target instead of us, in words."""
        other = self.current
        if other is None:
            return "nothing"
        return f"{getattr(other, '__module__', '?')}.{getattr(other, '__qualname__', repr(other))}"

    def put_in(self) -> None:
        setattr(self.parent, self.attribute, self.replacement)

    def put_back(self) -> None:
        if self.inherited:
            delattr(self.parent, self.attribute)
        else:
            setattr(self.parent, self.attribute, self.original)


def install(patch_name: str, module: ModuleType, site: Site) -> tuple[Installed, ...]:
    """Replace all targets of a site in its loaded module, or none.

    Raises whatever finding a target or a patch's factory raises; the module is then as it was.
    """
    found = tuple(Installed(patch_name, module, path, factory) for path, factory in site.replace.items())
    done: list[Installed] = []
    try:
        for one in found:
            one.put_in()
            done.append(one)
    except BaseException:
        for one in reversed(done):
            one.put_back()
        raise
    return found


def uninstall(installed: tuple[Installed, ...], site: Site) -> None:
    """Put back the identical originals, also where the replacement was since imported by name.

    Raises RestoreError, before anything is changed, when a target is no longer ours.
    """
    check_in_place(installed)
    for one in reversed(installed):
        one.put_back()
    found = holders.find([one.replacement for one in installed], site.holders)
    for one in installed:
        for holder in found.get(id(one.replacement), ()):
            holder.swap(one.replacement, one.original)


def check_in_place(installed: tuple[Installed, ...]) -> None:
    """Raise RestoreError, naming who, when a target has been replaced by someone else."""
    for one in installed:
        if not one.is_in_place:
            raise RestoreError(
                f"{one.target} cannot be restored: {one.overwritten_by()} was installed over megapatch's "
                "replacement; undo that first"
            )


def rebind(installed: tuple[Installed, ...], found: Mapping[int, list[holders.Holder]]) -> None:
    """Give the replacements to those who hold the originals, as `holders.find` found them for a whole batch."""
    for one in installed:
        if not one.inherited:  # who holds the parent class's function means that one
            swapped = [
                holder.where
                for holder in found.get(id(one.original), ())
                if holder.swap(one.original, one.replacement)
            ]
            one.rebound = (*one.rebound, *swapped)


def left_behind(installed: tuple[Installed, ...]) -> list[str]:
    """Who still holds an original and could not be given the replacement, in words."""
    ours = {id(one) for one in installed}
    for one in installed:
        ours.update(_parts(one.replacement))
    found = holders.out_of_reach([one.original for one in installed if not one.inherited], ours)
    return [
        f"{text} holds the original of {one.target}"
        for one in installed
        for text in found.get(id(one.original), ())
    ]


def _parts(function: FunctionType) -> set[int]:
    """The ids of a function and of what holds it together: its attributes, its closures, functions in those."""
    found: set[int] = set()
    todo = [function]
    while todo:
        one = todo.pop()
        if id(one) in found:
            continue
        found |= {id(one), id(vars(one)), *map(id, one.__closure__ or ())}
        for cell in one.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                if isinstance(cell.cell_contents, FunctionType):
                    todo.append(cell.cell_contents)
    return found
