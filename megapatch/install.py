"""Changes a site's targets all or none, and undoes it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

from . import holders
from .patch import MegapatchError, Site
from .target import Added, Installed, Rebuilt


class RestoreError(MegapatchError):
    """A target could not be put back because someone has patched on top of megapatch."""


def install(patch_name: str, module: ModuleType, site: Site) -> tuple[Installed, ...]:
    """Replace all targets of a site in its loaded module, or none.

    Raises whatever finding a target or a patch's factory raises; the module is then as it was.
    """
    kinds = {Installed: site.replace, Added: site.add}
    found = [kind(patch_name, module, path, make) for kind, ones in kinds.items() for path, make in ones.items()]
    done: list[Installed] = []
    try:
        for one in found:
            one.put_in()
            done.append(one)
        for target, make in site.rebuild(module).items() if site.rebuild else ():
            one = Rebuilt(target, make)
            one.put_in()
            done.append(one)
    except BaseException:
        for one in done:  # what was rebuilt last: without the functions
            one.put_back()
        raise
    return tuple(done)


def uninstall(installed: tuple[Installed, ...], site: Site) -> None:
    """Put back the identical originals, also where the replacement was since imported by name.

    Raises RestoreError, before anything is changed, when a target is no longer ours.
    """
    check_in_place(installed)
    ours = [one.replacement for one in installed]
    for one in installed:
        one.put_back()
    found = holders.find(ours, site.holders)
    for one, replacement in zip(installed, ours, strict=True):
        if one.current is not None:  # of what was added nothing is left
            for holder in found.get(id(replacement), ()):
                holder.swap(replacement, one.current)


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


def _parts(function: Any) -> set[int]:
    """The ids of a function and of what holds it together: its attributes, its closures, functions in those."""
    found: set[int] = set()
    if not isinstance(function, FunctionType):
        return {id(function)}
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
