"""Puts the originals back, on the user's demand: those of several sites, all or none.

It asks no record for its class: where others have taken megapatch out of `sys.modules`, this is loaded again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable

from ..errors import MegapatchError, RestoreError
from .afterwards import name_of, uninstall
from .holders import Holder
from .install import find_holders
from .record import Record
from .roster import Roster
from .settings import stands_for
from .target import ReplacedTarget


def matching_names(roster: Roster, patterns: Iterable[str]) -> list[str]:
    """Return the names of the patches that these names, globs or selections stand for.

    Raises:
        MegapatchError: for a pattern that stands for no patch.
    """
    # One that is not loaded may change numbers.
    known = {patch.name: patch.changes_numbers or not hasattr(patch, "sites") for patch in roster.known_patches}
    chosen: set[str] = set()
    for pattern in patterns:
        meant = {name for name, changes in known.items() if stands_for(pattern, name, changes)}
        if not meant:
            from .complaints import unknown_name

            raise MegapatchError(unknown_name(pattern, known))
        chosen |= meant
    return [name for name in known if name in chosen]


def records_of(roster: Roster, patterns: Iterable[str]) -> list[Record]:
    """Return the records that are about these patches only, without the lowest ones.

    Raises:
        MegapatchError: for a pattern that stands for no patch.
    """
    names = matching_names(roster, patterns)
    return [record for record in roster.records if all(patch.name in names for patch, _ in record.rows())]


def restore(records: Collection[Record]) -> None:
    """Put back the originals of these records, the latest installed first, all or none.

    They stay away until `allow_again()`.

    Raises:
        RestoreError: when someone else has patched a target on top of megapatch; nothing is changed then.
    """
    with contextlib.ExitStack() as locks:  # all of them, in order: nothing may change between check and change
        for record in records:
            locks.enter_context(record.lock)
        going = [target for record in records for target in record.installed]
        check_current(going, going)
        found = find_holders([(target, target.replacement) for target in going])
        for record in sorted(records, key=lambda record: record.installation, reverse=True):
            restore_one(record, found)


def restore_one(record: Record, found: dict[int, list[Holder]]) -> None:
    """Put back the originals of one record.

    Args:
        found: the holders of all replacements that go, as `holders.find` found them.

    Raises:
        RestoreError: when someone has patched on top; nothing is changed then.
    """
    with record.lock:
        check_current(record.installed)
        try:
            record.uninstall_earlier()
            uninstall(record.installed, found)
            record.note_restored()
        except BaseException as error:
            record.note_not_restored(error)
            raise


def check_current(targets: Iterable[ReplacedTarget], going: Iterable[ReplacedTarget] = ()) -> None:
    """Raise RestoreError if someone else has patched on top of a target; the message names them.

    Args:
        targets: those to be restored.
        going: targets that are restored first; they may stand on top of these.
    """
    original_of = {id(target.replacement): target.original for target in going}
    for target in targets:
        top = target.current
        while top is not target.replacement:
            if id(top) not in original_of:
                raise RestoreError(
                    f"{target.target} cannot be restored: {name_of(target, top)} was installed over megapatch's "
                    "replacement; undo that first"
                )
            top = original_of[id(top)]
