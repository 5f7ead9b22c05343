"""Changes a site's targets all or none, and undoes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from ..errors import RestoreError
from ..patch import Site
from . import holders
from .target import AddedTarget, RebuiltTarget, ReplacedTarget


def install(
    patch_name: str,
    module: ModuleType,
    site: Site,
    note: Callable[[ReplacedTarget], object] = lambda one: None,
) -> tuple[ReplacedTarget, ...]:
    """Replace all targets of a site in its loaded module, or none.

    note: told of each target before it is touched, so that someone knows of it however this ends.

    Raises whatever finding a target or a patch's factory raises; the module is then as it was.
    """
    found = [ReplacedTarget(patch_name, module, path, make) for path, make in site.replace.items()]
    found += [AddedTarget(patch_name, module, path, name) for path, name in site.add.items()]
    done: list[ReplacedTarget] = []

    def put_in(one: ReplacedTarget) -> None:
        done.append(one)  # first: Ctrl-C may come between any two lines
        note(one)
        one.put_in()

    try:
        for one in found:
            put_in(one)
        for target, make in site.rebuild(module).items() if site.rebuild else ():
            put_in(RebuiltTarget(target, make))
    except BaseException:
        take_out(done)
        raise
    return tuple(done)


def take_out(installed: Iterable[ReplacedTarget]) -> None:
    """Put back the originals of what is in place, in the targets and in the holders that were rebound.

    Goes on after an error, and raises the last one then.
    """
    with contextlib.ExitStack() as steps:
        for one in reversed(list(installed)):  # the stack turns them round: what was rebuilt comes last
            steps.callback(_give_back, one, one.replacement, one.holders)
            steps.callback(one.put_back)


def _give_back(one: ReplacedTarget, replacement: Any, places: Iterable[holders.Holder]) -> None:
    for holder in places:
        holder.swap(replacement, one.beneath)


def uninstall(installed: tuple[ReplacedTarget, ...], site: Site) -> None:
    """Put back the identical originals where they are in place (see `check_in_place`), and where the replacements
    were since imported by name; all or none.
    """
    replaced = [(one, one.replacement) for one in installed]
    found = holders.find([replacement for _, replacement in replaced], site.holders)
    with contextlib.ExitStack() as on_error:
        for one in installed:
            if one.is_put_in:
                on_error.callback(one.put_in)
                one.put_back()
        for one, replacement in replaced:
            if one.beneath is not None:  # of what was added nothing is left
                for holder in found.get(id(replacement), ()):
                    on_error.callback(_take_again, one, holder, one.beneath)
                    holder.swap(replacement, one.beneath)
        on_error.pop_all()


def _take_again(one: ReplacedTarget, holder: holders.Holder, original: Any) -> None:
    holder.swap(original, one.replacement)


def check_in_place(installed: tuple[ReplacedTarget, ...]) -> None:
    """Raise RestoreError, naming who, when a target has been replaced by someone else."""
    for one in installed:
        if not one.is_in_place:
            raise RestoreError(
                f"{one.target} cannot be restored: {one.overwritten_by()} was installed over megapatch's "
                "replacement; undo that first"
            )


def rebind(installed: tuple[ReplacedTarget, ...], found: Mapping[int, list[holders.Holder]]) -> None:
    """Give the replacements to those who hold the originals, as `holders.find` found them for a whole batch."""
    for one in installed:
        if not one.inherited:  # who holds the parent class's function means that one
            for holder in found.get(id(one.original), ()):
                before, one.holders = one.holders, (*one.holders, holder)
                if not holder.swap(one.original, one.replacement):
                    one.holders = before


def left_behind(installed: tuple[ReplacedTarget, ...]) -> dict[str, list[str]]:
    """Who still holds an original and could not be given the replacement, in words, by target.

    Goes through all objects of the process, once for all of these.
    """
    originals = {id(one.original): one for one in installed if not one.inherited}
    if not originals:
        return {}
    ours = {id(one) for one in installed}
    for one in installed:
        ours.update(_parts(one.replacement))
    told: dict[str, list[str]] = {}
    for number, holding in holders.out_of_reach([one.original for one in originals.values()], ours).items():
        target = originals[number].target
        told.setdefault(target, []).extend(f"{text} holds the original of {target}" for text in holding)
    return told


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
