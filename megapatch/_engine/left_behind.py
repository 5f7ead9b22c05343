"""Finds the holders of an original that no sweep finds, for a report: lists, closures, bound methods, objects."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Collection, Mapping, Sequence
from types import CellType, FrameType, FunctionType, MethodType
from typing import Any

from . import holders
from .target import ReplacedTarget


def left_behind(targets: tuple[ReplacedTarget, ...]) -> dict[str, list[str]]:
    """Name the holders of an original that could not be given the replacement, by target, in words.

    Goes through all objects of the process, once for all of these targets.
    """
    by_original = {id(target.original): target for target in targets if not target.inherited}
    if not by_original:
        return {}
    ours = {id(keeper) for target in targets for keeper in target.keepers}
    for target in targets:
        ours.update(_parts(target.replacement))
    found: dict[str, list[str]] = {}
    originals = [target.original for target in by_original.values()]
    for number, holding in _out_of_reach(originals, ours).items():
        name = by_original[number].target
        found.setdefault(name, []).extend(f"{text} holds the original of {name}" for text in holding)
    return found


def _parts(function: Any) -> set[int]:
    """Return the ids of a function, its attributes, its closure cells, and the functions in those."""
    found: set[int] = set()
    if not isinstance(function, FunctionType):
        return {id(function)}
    todo = [function]
    while todo:
        part = todo.pop()
        if id(part) in found:
            continue
        found |= {id(part), id(vars(part)), *map(id, part.__closure__ or ())}
        for cell in part.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                if isinstance(cell.cell_contents, FunctionType):
                    todo.append(cell.cell_contents)
    return found


def _out_of_reach(originals: Sequence[Any], ours: Collection[int]) -> dict[int, list[str]]:
    """Describe the holders that no sweep finds: closures, lists, bound methods, classes, other dictionaries.

    Goes through all objects of the process: about a tenth of a second once torch is loaded.

    Args:
        ours: ids of the objects that hold an original rightly.

    Returns:
        Descriptions in words, by the original's id.
    """
    wanted, sought = {id(original) for original in originals}, tuple(originals)
    found: dict[int, list[str]] = {}
    there = [
        holder
        for holder in gc.get_referrers(*sought)
        if not (holder is sought or holder is originals or id(holder) in ours or isinstance(holder, FrameType))
    ]
    named = holders.find(there)
    for holder in there:
        for held in {id(referent) for referent in gc.get_referents(holder)} & wanted:
            found.setdefault(held, []).append(_describe(holder, named))
    return found


def _describe(holder: Any, named: Mapping[int, Sequence[holders.Holder]]) -> str:
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
    return f"a {type(holder).__qualname__}{_name_of(holder, named.get(id(holder), ()))}"


def _name_of(container: Any, names: Sequence[holders.Holder]) -> str:
    """Name its owner in parentheses: a module's name for it, or the class or object that it belongs to."""
    if names:
        return f" ({names[0].where})"
    for owner in gc.get_referrers(container):
        if isinstance(owner, type):
            return f" (class {owner.__module__}.{owner.__qualname__})"
        if getattr(owner, "__dict__", None) is container:
            return f" (attributes of a {type(owner).__qualname__})"
    return ""
