"""Considers or restores several sites, with one search for the holders of all functions concerned."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from types import ModuleType
from typing import TYPE_CHECKING

from . import holders
from .edges import comes_from_outside
from .install import check_current
from .record import Record
from .site_record import SiteRecord

if TYPE_CHECKING:
    from .target import ReplacedTarget


def consider(sites: Iterable[tuple[SiteRecord, ModuleType, bool]]) -> list[SiteRecord]:
    """Consider these sites, then look once for all other holders of the replaced functions.

    Args:
        sites: with their modules, and whether to wait where another thread is considering one.

    Returns:
        The records of those that were applied.
    """
    fresh: list[SiteRecord] = []
    try:
        for record, module, wait in sites:
            fresh.append(record)
            if not record.consider(module, wait):
                fresh.pop()
        seen, places = _search(fresh)
        return [record for record, installed in seen if record.rebind(installed, places)]
    except BaseException as error:  # Ctrl-C, or out of memory: no holder may be left with a different function
        for record in fresh:
            with contextlib.suppress(BaseException):  # this one again
                record.abandon(error)
        if not fresh or not isinstance(error, Exception) or comes_from_outside(error):
            raise
    return []


def _search(
    fresh: list[SiteRecord],
) -> tuple[list[tuple[SiteRecord, tuple[ReplacedTarget, ...]]], dict[int, list[holders.Holder]]]:
    """Return the targets installed at these sites, and the holders of their originals."""
    # In this order: another thread searches for the targets that it installs meanwhile.
    seen = [(record, record.installed) for record in fresh]
    originals = [target.original for _, installed in seen for target in installed if target.may_be_held]
    return seen, holders.find(originals, [path for record in fresh for path in record.site.holders])


def restore(records: Collection[Record]) -> None:
    """Put back the originals of these records, the latest installed first, all or none.

    Raises:
        RestoreError: when someone else has patched a target on top of megapatch; nothing is changed then.
    """
    with contextlib.ExitStack() as locks:  # all of them, in order: nothing may change between check and change
        for record in records:
            locks.enter_context(record.lock)
        going = [target for record in records for target in record.installed]
        check_current(going, going)
        declared = [path for record in records if isinstance(record, SiteRecord) for path in record.site.holders]
        found = holders.find([target.replacement for target in going], declared)
        for record in sorted(records, key=lambda record: record.installation, reverse=True):
            record.restore(found)
