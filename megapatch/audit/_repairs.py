"""The patches that would repair a finding in this process: needed here, perhaps, and not in place."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import NamedTuple

from .._engine.engine import this_process
from .._engine.record import NEEDS_ATTENTION, Record
from ..patch import Status, VerdictKind

_NOT_IN_PLACE = {Status.DISABLED, *NEEDS_ATTENTION} - {Status.REFUSED}
"""Statuses of patches that may be needed; one that was refused is for code that it does not know."""


class Repair(NamedTuple):
    """A patch that would repair a finding.

    Attributes:
        name: of the patch.
        reason: why it is not in place.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def repairs(names: Collection[str]) -> tuple[Repair, ...]:
    """Return those of these patches that are not in place here, and may be needed.

    Their module is loaded, and its diagnosis does not say that it is right. A patch that is switched off is not
    diagnosed; one whose reason is that may not be needed.
    """
    found: dict[str, Repair] = {}
    for record in this_process().records:
        for patch, module in record.rows():
            if patch.name in names and module in sys.modules and _would_repair(record):
                found.setdefault(patch.name, Repair(patch.name, record.reason))
    return tuple(found.values())


def _would_repair(record: Record) -> bool:
    is_needed = record.verdict is None or record.verdict.kind is VerdictKind.NEEDED
    return record.status in _NOT_IN_PLACE and is_needed
