"""A framework's own patches of Megatron and torch together with all of megapatch's, in both orders."""

from __future__ import annotations

from typing import Any, NamedTuple

from megapatch import apply, report, restore
from megapatch._reporting.foreign import patched_by_others
from rigs.stand_ins import is_stand_in

NOT_IN_PLACE = {"refused", "failed", "overwritten", "missed"}


class Together(NamedTuple):
    """The fate of both. `numbers`: the results of a run with megapatch alone, ours first, and theirs first."""

    others: list[tuple[str, str]]
    not_in_place: list[tuple[str, str, str, str]]
    numbers: list[Any]


def together(theirs, numbers):
    """Call `theirs`, which patches, after megapatch's patches are in place; then put megapatch's on top of it."""
    restore()
    apply()
    found = [numbers()]
    theirs()
    lost = [("ours first", *one) for one in _not_in_place()]
    found.append(numbers())
    restore()
    apply()
    lost += [("theirs first", *one) for one in _not_in_place()]
    found.append(numbers())
    return Together(patched_by_others(), lost, found)


def _not_in_place():
    return [
        (patch["name"], site["module"], site["status"])
        for patch in report().to_dict()["patches"]
        for site in patch["sites"]
        if site["status"] in NOT_IN_PLACE and not is_stand_in(site["module"])
    ]
