"""Finds other holders of a replaced function by identity: they get the replacement, or are named in the report.

`from x import f` binds the function itself, so that changing `x.f` is not enough. Names at module level are
found in one sweep over `sys.modules`. Only dictionaries are read, so that a module's lazy attributes are never
triggered.

The sweep takes some ten milliseconds once torch is loaded. A function that nobody else refers to is not looked
for: see `ReplacedTarget.may_be_held`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from .._python.loaded_modules import loaded_modules


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
