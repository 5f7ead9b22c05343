"""The one INFO message, about several sites at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .site_record import SiteRecord

_LONGEST = 182
"""Characters behind `APPLIED`."""


def what_was_applied(records: Iterable[SiteRecord]) -> str:
    """Name the patches that have just been applied, and where: what follows in `APPLIED`, for which users look.

    If that is too long for a line, the first line counts them, and each module has a line of its own.
    """
    by_module: dict[str, list[str]] = {}
    changing: dict[str, bool] = {}
    for record in records:
        name = record.patch.name + " (changes numbers)" * record.patch.changes_numbers
        by_module.setdefault(record.site.module, []).append(name)
        changing[record.patch.name] = record.patch.changes_numbers
    applied = [f"{', '.join(names)} to {module}" for module, names in by_module.items()]
    line = "; ".join(applied)
    if len(line) <= _LONGEST:
        return line
    changes = f", {number} of which may change numbers" if (number := sum(changing.values())) else ""
    patches = f"{len(changing)} patch{'es' * (len(changing) > 1)}"
    where = f"{len(by_module)} module{'s' * (len(by_module) > 1)}"
    return "\n  ".join([f"{patches} to {where}{changes}:", *applied])
