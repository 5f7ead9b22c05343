"""Finds other holders of a replaced function by identity: they get the replacement, or are named in the report.

`from x import f` binds the function itself, so that changing `x.f` is not enough. Names at module level are
found in one sweep over `sys.modules`. Only dictionaries are read, so that a module's lazy attributes are never
triggered.

The sweep takes some ten milliseconds once torch is loaded. A function that nobody else refers to is not looked
for: see `ReplacedTarget.may_be_held`.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Collection, Iterable, Sequence
from types import CellType, FrameType, MethodType
from typing import Any, NamedTuple

from .._loaded_modules import loaded_modules


class Holder(NamedTuple):
    """A name at module level that holds an object: a key of the module's dictionary."""

    where: str
    names: dict[str, Any]
    name: str

    def swap(self, old: Any, new: Any) -> bool:
        """Put `new` where `old` is. Returns False, with nothing changed, when something else is there by now."""
        if self.names.get(self.name) is not old:
            return False
        self.names[self.name] = new
        return True


def find(objects: Iterable[Any]) -> dict[int, list[Holder]]:
    """Find everything that holds one of the objects, in one sweep. Returns holders by the object's id."""
    wanted = {id(held) for held in objects}
    found: dict[int, list[Holder]] = {}
    if not wanted:
        return found
    for module_name, names in loaded_modules():
        if wanted.isdisjoint(map(id, list(names.values()))):  # in C: a third faster than the loop below
            continue
        for name, value in list(names.items()):
            if id(value) in wanted:
                found.setdefault(id(value), []).append(Holder(f"{module_name}:{name}", names, name))
    return found


def out_of_reach(originals: Sequence[Any], ours: Collection[int]) -> dict[int, list[str]]:
    """Describe the holders that no sweep finds: closures, lists, bound methods, classes, other dictionaries.

    Goes through all objects of the process: about a tenth of a second once torch is loaded.

    Args:
        ours: ids of the objects that hold an original rightly.

    Returns:
        Descriptions in words, by the original's id.
    """
    wanted, sought = {id(original) for original in originals}, tuple(originals)
    found: dict[int, list[str]] = {}
    for holder in gc.get_referrers(*sought):
        if holder is sought or holder is originals or id(holder) in ours or isinstance(holder, FrameType):
            continue
        for held in {id(referent) for referent in gc.get_referents(holder)} & wanted:
            found.setdefault(held, []).append(_describe(holder))
    return found


def _describe(holder: Any) -> str:
    if isinstance(holder, MethodType):
        return f"a bound method of a {type(holder.__self__).__qualname__}"
    if isinstance(holder, functools.partial):
        return "a functools.partial"
    if isinstance(holder, CellType):
        users = {
            f"{function.__module__}.{function.__qualname__}"
            for closure in gc.get_referrers(holder)
            if isinstance(closure, tuple)
            for function in gc.get_referrers(closure)
            if getattr(function, "__closure__", None) is closure
        }
        return f"a closure ({', '.join(sorted(users)) or 'of a running function'})"
    return f"a {type(holder).__qualname__}{_name_of(holder)}"


def _name_of(container: Any) -> str:
    """Name its owner in parentheses: a module's name for it, or the class or object that it belongs to."""
    names = find([container]).get(id(container))
    if names:
        return f" ({names[0].where})"
    for owner in gc.get_referrers(container):
        if isinstance(owner, type):
            return f" (class {owner.__module__}.{owner.__qualname__})"
        if getattr(owner, "__dict__", None) is container:
            return f" (attributes of a {type(owner).__qualname__})"
    return ""
