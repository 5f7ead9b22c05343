"""Finds other holders of a replaced function by identity: they get the replacement, or are named in the report.

`from x import f` binds the function itself, so that changing `x.f` is not enough. Names at module level are
found in one sweep over `sys.modules`. Only dictionaries are read, so that a module's lazy attributes are never
triggered. And Ray makes of a class a subclass for its actors, each method of which holds the class's in a closure
(`_inject_tracing_into_class`, seen in 2.54): an actor that imports megapatch itself is of such a class by then.

The sweep takes some ten milliseconds once torch is loaded. A function that nobody else refers to is not looked
for: see `ReplacedTarget.may_be_held`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from types import CellType
from typing import Any, NamedTuple

from .._python.loaded_modules import loaded_modules


class InClosure(NamedTuple):
    """A cell of a closure, to be read and written like a module's dictionary."""

    cell: CellType

    def get(self, name: str) -> Any:
        return self.cell.cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self.cell.cell_contents = value


class Holder(NamedTuple):
    """A name that holds an object: a key of a module's dictionary, or a method of one of Ray's actor classes."""

    where: str
    names: dict[str, Any] | InClosure
    name: str

    def swap(self, old: Any, new: Any) -> bool:
        """Put `new` where `old` is. Returns False, with nothing changed, when something else is there by now."""
        if self.names.get(self.name) is not old:
            return False
        self.names[self.name] = new
        return True


def find(objects: Iterable[Any], methods: Iterable[tuple[Any, str]] = ()) -> dict[int, list[Holder]]:
    """Find everything that holds one of the objects, in one sweep. Returns holders by the object's id.

    Args:
        methods: classes, and names of the objects in them; what is no class is passed over.
    """
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
    for owner, name in methods:
        for actor in _actor_classes(owner):
            for cell in getattr(vars(actor).get(name), "__closure__", None) or ():
                with contextlib.suppress(ValueError):  # the cell is empty
                    if id(cell.cell_contents) in wanted:
                        where = f"{actor.__module__}:{actor.__qualname__}.{name} (Ray's actor class)"
                        found.setdefault(id(cell.cell_contents), []).append(Holder(where, InClosure(cell), name))
    return found


def _actor_classes(owner: Any) -> Iterator[type]:
    """Return the classes that Ray has made of this one, or of one that inherits from it."""
    heirs: list[type] = type.__subclasses__(owner) if isinstance(owner, type) else []
    for heir in heirs:
        if "__ray_actor_class__" in vars(heir):
            yield heir
        yield from _actor_classes(heir)
