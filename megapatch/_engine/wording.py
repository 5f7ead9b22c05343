"""What the engine says of several sites at once: in the one INFO line, and in strict mode's error."""

from __future__ import annotations

from collections.abc import Iterable

from .record import Record, SiteRecord
from .settings import DISABLE, STRICT


def what_was_applied(records: Iterable[SiteRecord]) -> str:
    """Name the patches that have just been applied, and where; the one line that a user looks for in a log."""
    by_module: dict[str, list[str]] = {}
    for record in records:
        name = record.patch.name + " (changes numbers)" * record.patch.changes_numbers
        by_module.setdefault(record.site.module, []).append(name)
    return "megapatch applied " + "; ".join(
        f"{', '.join(names)} to {module}" for module, names in by_module.items()
    )


def not_in_place(records: Iterable[Record]) -> str:
    return "; ".join(
        f"{record.patch.name} is {record.status.value} at {record.site.module}: {record.reason} "
        f"({STRICT} makes this an error; {DISABLE}={record.patch.name} does without the patch)"
        for record in records
    )
