"""One target of a site: found in the loaded module, installed, reverted.

The replacement is an ordinary function, never a wrapt proxy: torch.compile silently drops a proxy's body,
and a proxy cannot be pickled or deep-copied.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import wrapt

from .._python.dotted import below
from .._python.layers import MARK, layers_of
from .holders import Holder


class ReplacedTarget:
    """A function that is replaced by the one that `make` returns for it.

    Attributes:
        target: ``"module:Class.attribute"``.
        original: the function that was found; None for an added one.
        replacement: the function to install.
        inherited: whether the class itself had nothing there, so that reverting deletes.
        holders: other places that held the original and were given the replacement.
        is_function: whether it is one, which shows whether it was loaded again.
    """

    is_function = True

    __slots__ = (
        "_was_alone",
        "attribute",
        "holders",
        "inherited",
        "module",
        "original",
        "parent",
        "replacement",
        "target",
    )

    def __init__(self, patch_name: str, module: ModuleType, path: str, make: Callable[..., Any]) -> None:
        self.module, self.target = module, f"{module.__name__}:{path}"
        self.parent, self.attribute = self.find(self.module)[:2]
        self._was_alone = _is_alone(self.parent, self.attribute)
        self.original = self.find(self.module)[2]
        self.inherited = self.attribute not in vars(self.parent)
        self.holders: tuple[Holder, ...] = ()
        self.replacement = self._make_replacement(patch_name, make)

    def find(self, module: ModuleType) -> tuple[Any, str, Any]:
        """Return parent, attribute and current value of the target in this module."""
        found: tuple[Any, str, Any] = wrapt.resolve_path(*below(module, self.target.partition(":")[2]))
        return found

    def _make_replacement(self, patch_name: str, make: Callable[..., Any]) -> Any:
        replacement = self._check_plain(make(self.original))
        setattr(replacement, MARK, patch_name)
        with contextlib.suppress(TypeError, ValueError):  # of an original that has none
            # getfullargspec() follows no __wrapped__.
            vars(replacement)["__signature__"] = inspect.signature(replacement)
        if self.inherited:  # pickle goes by these, and would find the parent's
            replacement.__module__ = self.parent.__module__
            replacement.__qualname__ = f"{self.parent.__qualname__}.{self.attribute}"
        return replacement

    def _check_plain(self, function: Any) -> FunctionType:
        if type(function) is not FunctionType:
            raise TypeError(
                f"the replacement for {self.target} is a {type(function).__name__}, not a plain function"
            )
        return function

    # ------------------------------------------------------------------------ questions
    @property
    def current(self) -> Any:
        """The object at the target's path now (after a reload, in the new class); None for nothing."""
        return self.at(self.module)

    def at(self, module: ModuleType) -> Any:
        """Return the object at the target's path in this module, or another one of its name; None for nothing."""
        try:
            return self.find(module)[2]
        except AttributeError:
            return None

    @property
    def may_be_held(self) -> bool:
        """Whether something else may hold the original by value, and has to be looked for.

        Nothing does if the parent held the only reference when the original was found, as is usual while the
        module is still being imported. Without this look, an import of Megatron makes twenty searches, not one.
        """
        return not (self.inherited or self._was_alone)

    @property
    def is_current(self) -> bool:
        """Whether the module has our replacement at the target's path."""
        return self.current is self.replacement

    @property
    def is_in_effect(self) -> bool:
        """Whether our replacement is at the target's path, or below a wrapper there, which can reach it.

        functools.wraps alone does not say that the wrapper calls ours, and a wrapper may do without it.
        """
        current = self.current
        if current is self.replacement:
            return True
        from .reaches import holds, reaches  # only where others have patched on top

        if not any(layer is self.replacement for layer in layers_of(current)):
            return holds(current, self.replacement)
        return reaches(current, self.replacement, self.find(self.module)[0])

    @property
    def is_ours(self) -> bool:
        """Whether our replacement is still where `install` put it, even in a class that a reload has replaced."""
        return vars(self.parent).get(self.attribute) is self.replacement

    @property
    def after_revert(self) -> Any:
        """The object that holders get instead of the replacement once the target is reverted; None for nothing."""
        return self.original

    @property
    def keepers(self) -> tuple[object, ...]:
        """Our own objects that hold the original, so as to put it back."""
        return (self,)

    @property
    def rebound(self) -> tuple[str, ...]:
        """The holders, as ``"module:name"``."""
        return tuple(holder.where for holder in self.holders)

    # ------------------------------------------------------------------------ changes
    def install(self) -> None:
        setattr(self.parent, self.attribute, self.replacement)

    def revert(self) -> None:
        """Undo `install`; do nothing if it is undone, or someone else has put something there."""
        if not self.is_ours:
            return
        if self.inherited:
            delattr(self.parent, self.attribute)
        else:
            setattr(self.parent, self.attribute, self.original)

    def put_back(self, replacement: Any) -> None:
        """Undo `revert`, given the replacement that there was before it."""
        self.install()


def _is_alone(parent: Any, attribute: str) -> bool:
    """Return whether nothing but the parent's dictionary refers to the value of this attribute."""
    names, alone = vars(parent), {"attribute": lambda: None}
    return attribute in names and sys.getrefcount(names[attribute]) == sys.getrefcount(alone["attribute"])
