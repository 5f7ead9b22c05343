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

from .patch import MARK


class Installed:
    """A function that has been replaced; make: takes the original and returns the one to install.

    target: ``"module:Class.attribute"``. inherited: whether there was nothing in the class itself, so that putting
    back deletes. rebound: other places, as ``"module:name"``, that held the original.
    """

    __slots__ = ("attribute", "inherited", "module", "original", "parent", "rebound", "replacement", "target")

    def __init__(self, patch_name: str, module: ModuleType, path: str, make: Callable[..., Any]) -> None:
        self.module, self.target = module, f"{module.__name__}:{path}"
        self.parent, self.attribute, self.original = self._find()
        self.inherited = self.attribute not in vars(self.parent)
        self.rebound: tuple[str, ...] = ()
        self.replacement = self._made(patch_name, make)

    def _find(self) -> tuple[Any, str, Any]:
        """Parent, attribute and value, of what the module has now."""
        found: tuple[Any, str, Any] = wrapt.resolve_path(self.module, self.target.partition(":")[2])
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
        try:
            return self._find()[2]
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
        parent, attribute, _ = self._find()
        if isinstance(parent, type) and parent is not self.parent:
            return (parent.__module__, parent.__qualname__) == (self.parent.__module__, self.parent.__qualname__)
        if self.inherited and attribute not in vars(parent):
            return False
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


class Added(Installed):
    """A function where the class, or the module, had none of its own; make: that function itself.

    It stays what and where it is: a class that is pickled by value takes it along by its name, and who reads
    that imports megapatch.
    """

    __slots__ = ()

    def _find(self) -> tuple[Any, str, Any]:
        parent_path, _, attribute = self.target.partition(":")[2].rpartition(".")
        parent = wrapt.resolve_path(self.module, parent_path)[2] if parent_path else self.module
        return parent, attribute, vars(parent).get(attribute)

    def _made(self, patch_name: str, make: Callable[..., Any]) -> Any:
        if not self.inherited:
            raise TypeError(f"{self.target} is to be added, and is there already")
        setattr(self._plain(make), MARK, patch_name)
        return make

    @property
    def was_reloaded(self) -> bool:
        parent, attribute, _ = self._find()
        return parent is not self.parent and attribute not in vars(parent)


class Rebuilt(Installed):
    """An object that was made of what patches change, such as a Ray actor class; make: takes the original and
    returns one made of what is in place by then.

    Several patches may have one made again: there is one for all of them, the latest.
    """

    __slots__ = ("_make", "_shared")

    def __init__(self, target: str, make: Callable[[Any], Any]) -> None:
        self.module, self.target = sys.modules[target.partition(":")[0]], target
        self.parent, self.attribute, self.original = self._find()
        self.inherited, self.rebound, self._make = False, (), make
        shared = _rebuilt.get(target)
        if shared is None or shared.latest is not self.original:
            shared = _rebuilt[target] = _Shared(self.original)
        self._shared = shared

    @property
    def replacement(self) -> Any:
        return self._shared.latest

    @property
    def was_reloaded(self) -> bool:
        return False  # functions tell: of an object it cannot be seen who has made it

    def put_in(self) -> None:
        self._put(self._make(self._shared.original))
        self._shared.users += 1

    def put_back(self) -> None:
        """Once for all: to be called when the functions of the site are back."""
        self._shared.users -= 1
        original = self._shared.original
        self._put(self._make(original) if self._shared.users else original)

    def _put(self, made: Any) -> None:
        self._shared.latest = made
        setattr(self.parent, self.attribute, made)


class _Shared:
    """What is rebuilt for several patches: the original, the latest, and how many want it."""

    def __init__(self, original: Any) -> None:
        self.original = self.latest = original
        self.users = 0


_rebuilt: dict[str, _Shared] = {}
