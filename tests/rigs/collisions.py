"""A framework's own patches of Megatron and torch together with all of megapatch's, in both orders."""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from megapatch import apply, report, restore
from rigs.stand_ins import is_stand_in

NOT_IN_PLACE = {"refused", "failed", "overwritten", "missed"}


class Together(NamedTuple):
    """The fate of both. `others`: (module, function of Megatron's or torch's that it has patched). `numbers`: the
    results of a run with megapatch alone, ours first, and theirs first."""

    others: list[tuple[str, str]]
    not_in_place: list[tuple[str, str, str, str]]
    numbers: list[Any]


def together(theirs, numbers):
    """Call `theirs`, which patches, after megapatch's patches are in place; then put megapatch's on top of it."""
    restore()
    apply()
    found, before = [numbers()], functions()
    theirs()
    others = [
        (function.__globals__["__name__"], target)
        for target, function in functions().items()
        if before.get(target, function) is not function
    ]
    lost = [("ours first", *one) for one in _not_in_place()]
    found.append(numbers())
    restore()
    apply()
    lost += [("theirs first", *one) for one in _not_in_place()]
    found.append(numbers())
    return Together(others, lost, found)


def functions():
    """Return the functions of modules of Megatron's and torch.distributed's, and of their classes, by name."""
    found = {}
    for name, module in list(sys.modules.items()):
        if type(module) is ModuleType and f"{name}.".startswith(("megatron.", "torch.distributed.")):
            classes = [value for value in vars(module).values() if issubclass(type(value), type)]
            for owner in (module, *classes):
                for attribute, value in list(vars(owner).items()):
                    if type(value) is FunctionType:
                        found[f"{name}:{owner.__name__}.{attribute}"] = value
    return found


def _not_in_place():
    return [
        (patch["name"], site["module"], site["status"])
        for patch in report().to_dict()["patches"]
        for site in patch["sites"]
        if site["status"] in NOT_IN_PLACE and not is_stand_in(site["module"])
    ]
