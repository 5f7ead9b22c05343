"""The fate of each rule in this process: kept, broken, noted, accepted, or not watched, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from .._engine.engine import this_process
from ..patch import Status
from ._audit import Audit, Part
from ._findings import Ledger
from ._microbatches import Microbatches
from ._ranks import Ranks
from ._rules import RULES

_NOT_COMPARED = "ranks are not compared"


class RuleStatus(NamedTuple):
    """What became of a rule in this process.

    Attributes:
        name: a key of `megapatch.audit.RULES`.
        status: ``broken``, ``noted``, ``accepted``, ``not watched``, or ``kept`` as far as it was looked at.
        reason: why it is not watched, such as that there was nothing to look at; or else "".
    """

    name: str
    status: str
    reason: str = ""


def statuses(ledger: Ledger, audit: Audit | None) -> tuple[RuleStatus, ...]:
    """Return all rules, in the order of the page.

    Args:
        audit: that watches this process; None if none does any more, or did.
    """
    broken = {finding.rule for finding in (*ledger.findings(), *ledger.notes())}
    blind = _unwatched(audit) if audit else dict.fromkeys(RULES, "the audit has ended, or did not begin")
    found = []
    for name, rule in RULES.items():
        if name in broken:
            found.append(RuleStatus(name, "noted" if rule.is_note else "broken"))
        elif name in ledger.accepted:
            found.append(RuleStatus(name, "accepted"))
        else:
            found.append(
                RuleStatus(name, "not watched", blind[name]) if name in blind else RuleStatus(name, "kept")
            )
    return tuple(found)


def rules_of(part: Part) -> list[str]:
    """Return the rules that a part of an audit looks at: those that the first line of its docstring names."""
    title = (part.doc or "").partition("\n")[0].partition(":")[0]
    named = re.findall(r"[a-z-]+", title)
    return [name for name in RULES if name in named]


def _unwatched(audit: Audit) -> dict[str, str]:
    """Return, by rule that is not watched, why."""
    found = {name: rule.needs for name, rule in RULES.items() if rule.needs and name not in audit.ledger.met}
    for part in audit.parts:
        for reason in _reasons(audit, part):
            found.update(dict.fromkeys(rules_of(part), reason))
    return found


def _reasons(audit: Audit, part: Part) -> Iterator[str]:
    """Yield why a part does not see what it looks for."""
    if type(part) in (Ranks, Microbatches) and not audit.part(Ranks).compares:
        yield _NOT_COMPARED
    if any(look.__qualname__.startswith(f"{type(part).__name__}.") for look in audit.ledger.broken):
        yield "a look of it has failed; the log says how"
    records = [record for record in this_process().records if record.name == part.name]
    if records and not any(record.status is Status.APPLIED for record in records):
        yield "nothing that it watches was imported"
    for record in records:
        if record.status in (Status.REFUSED, Status.FAILED):
            yield f"{record.where}: {record.reason}"
