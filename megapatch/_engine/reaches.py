"""Whether a function that others have put on top of ours still calls ours."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from .._python.layers import HIDDEN, attribute_of

_MOST_PARTS, _MOST_HANDS = 5000, 100
_UNWRAPPING = (HIDDEN, "unwrap")
_CONTAINERS = (list, tuple, set, frozenset, dict)


def reaches(top: Any, sought: Any, owner: Any) -> bool:
    """Return whether a call of `top` may come to `sought`.

    Follows all that code can call: closures, defaults, attributes and containers, globals that the code names, and
    those of modules, classes and objects that it names. ``__wrapped__`` counts only where code names it, and in
    proxies, whose call goes there. A search that takes too long ends with yes.

    Args:
        owner: the module or class that has `top`.
    """
    return _Search(sought, owner).finds(top)


def holds(top: Any, sought: Any) -> bool:
    """Return whether a function of others has `sought` at hand, in a closure or a global that its code names.

    Less than `reaches`: without ``__wrapped__`` nothing else says that it has to do with ours.
    """
    found = [top]
    for part in found:  # which grows
        if part is sought:
            return True
        if type(part) is FunctionType and len(found) < _MOST_HANDS:
            at_hand = [*(part.__defaults__ or ()), *(part.__kwdefaults__ or {}).values()]
            at_hand += [part.__globals__.get(name) for name in _names_in(part.__code__)]
            found += [value for cell in part.__closure__ or () for value in _contents(cell)]
            found += [value for value in at_hand if value is sought]
    return False


class _Search:
    """The names that the code seen so far uses, and the objects that hold something by name."""

    def __init__(self, sought: Any, owner: Any) -> None:
        self._sought, self._names = sought, set[str]()
        self._owners: dict[int, Any] = {id(owner): owner}
        self._seen: dict[int, Any] = {}

    def finds(self, top: Any) -> bool:
        todo = [top]
        while todo:
            part = todo.pop()
            if part is self._sought or len(self._seen) > _MOST_PARTS:
                return True
            if id(part) not in self._seen:
                self._seen[id(part)] = part
                todo += self._held_by(part)
            if not todo:
                todo = [value for value in self._named() if id(value) not in self._seen]
        return False

    def _held_by(self, part: Any) -> list[Any]:
        kind = type(part)  # of a proxy, which passes for the object that it wraps, its own
        if issubclass(kind, _CONTAINERS):
            return [*dict.values(part)] if issubclass(kind, dict) else [*part]
        if kind is functools.partial:
            return [part.func, *part.args, *part.keywords.values()]
        if issubclass(kind, (MethodType, staticmethod, classmethod)):
            return [part.__func__, getattr(part, "__self__", None)]
        if issubclass(kind, property):
            return [part.fget]
        if issubclass(kind, FunctionType):
            return self._held_by_function(part)
        if issubclass(kind, (str, bytes, int, float, CodeType, BuiltinFunctionType, type(None))):
            return []
        if issubclass(kind, ModuleType) or issubclass(kind, type):
            self._owners[id(part)] = part
            return []
        return self._held_by_object(part)

    def _held_by_function(self, function: FunctionType) -> list[Any]:
        found = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        found += [value for cell in function.__closure__ or () for value in _contents(cell)]
        found += _without_hidden(vars(function))
        root = str(function.__globals__.get("__name__")).partition(".")[0]
        if root not in sys.stdlib_module_names and root != "torch":  # their decorators have the rest in closures
            names = set(_names_in(function.__code__))
            self._names |= names
            found += [function.__globals__[name] for name in names if name in function.__globals__]
            found += [sys.modules[name] for name in names if name in sys.modules]
        return found

    def _held_by_object(self, part: Any) -> list[Any]:
        if any(kind.__module__.partition(".")[0] == "wrapt" for kind in type(part).__mro__):
            return [attribute_of(part, HIDDEN), attribute_of(part, "_self_wrapper")]
        self._owners[id(part)] = part
        call = next((vars(kind)["__call__"] for kind in type(part).__mro__ if "__call__" in vars(kind)), None)
        if call is None:  # not a function: only what code names is taken from it
            return []
        self._owners[id(type(part))] = type(part)
        own = vars_of(part)
        if not isinstance(call, FunctionType):  # in C, such as that of functools.lru_cache
            return [held for held in gc.get_referents(part) if held is not own] + _without_hidden(own)
        return [call, *_without_hidden(own)]

    def _named(self) -> list[Any]:
        """Return the attributes of owners that code names, and lower layers where it asks for them."""
        found = [value for owner in list(self._owners.values()) for value in self._named_in(owner)]
        if not self._names.isdisjoint(_UNWRAPPING):
            found += [attribute_of(part, HIDDEN) for part in list(self._seen.values())]
        return found

    def _named_in(self, owner: Any) -> Iterator[Any]:
        kinds = owner.__mro__ if issubclass(type(owner), type) else ()
        for names in [vars(kind) for kind in kinds] or [vars_of(owner)]:
            for name in self._names & names.keys():
                yield names[name]


def vars_of(part: Any) -> dict[str, Any]:
    """Return an object's own attributes, without running code of its class."""
    try:
        found = object.__getattribute__(part, "__dict__")
    except Exception:
        return {}
    return found if isinstance(found, dict) else {}


def _without_hidden(names: dict[str, Any]) -> list[Any]:
    return [value for name, value in names.items() if name != HIDDEN]


def _contents(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # an empty cell
        return []


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names and texts of a function's code, and of functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names_in(constant)
