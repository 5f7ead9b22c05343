"""The fate of each rule in this process: kept, broken, noted, accepted, or not watched, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import MappingProxyType
from typing import NamedTuple

from .._engine.engine import this_process
from ..patch import Status
from ._audit import Audit, Part
from ._findings import Ledger
from ._invariants import INVARIANTS
from ._microbatches import Microbatches
from ._ranks import Ranks

_NOT_COMPARED = "ranks are not compared"
_NO_CALL = "no call of Megatron's schedules has trained"
_NO_LOAD = "no optimizer state was loaded"
_NO_ADVANCE = "no OptimizerParamScheduler has advanced"

NEEDS = MappingProxyType(
    {
        "hooks-balanced": "there was no call of Megatron's schedules",
        "training-mode": _NO_CALL,
        "evaluation-mode": "no call of Megatron's schedules was forward-only",
        "calls-alike": _NO_CALL,
        "data-differs": _NO_CALL,
        "tokens-counted": _NO_CALL,
        "divided-by-tokens": _NO_CALL,
        "fresh-counts": "no call of Megatron's schedules has trained a model whose routers count tokens",
        "gathered-when-read": "no parameters were left to be gathered, as by overlap_param_gather",
        "ranks-agree": "no ranks that hold the same parameters were compared",
        "stages-differ": "no seeds of several pipeline stages were compared",
        "expert-streams-differ": "no random streams of expert ranks were compared",
        "learning-rate-moves": _NO_ADVANCE,
        "schedule-once": _NO_ADVANCE,
        "schedule-moves": "there was no OptimizerParamScheduler",
        "loaded-is-there": _NO_LOAD,
        "resumed-together": _NO_LOAD,
        "saved-what-is": "no model was saved by dist_checkpointing",
        "saved-is-trained": "no model was saved by dist_checkpointing",
        "weights-synced": "no weights were compared with those of generation",
        "resumed": "nobody paused generation here",
    }
)
"""By rule, what it says of a process in which there was nothing to look at; until `Ledger.met` has the rule."""


class Rule(NamedTuple):
    """A rule and its status.

    Attributes:
        name: a key of `INVARIANTS`.
        status: ``broken``, ``noted``, ``accepted``, ``not watched``, or ``kept`` as far as it was looked at.
        reason: why it is not watched, such as that there was nothing to look at; or else "".
    """

    name: str
    status: str
    reason: str = ""


def rules(ledger: Ledger, audit: Audit | None) -> tuple[Rule, ...]:
    """Return all rules, in the order of the page.

    Args:
        audit: that watches this process; None if none does any more, or did.
    """
    broken = {finding.invariant for finding in (*ledger.findings(), *ledger.notes())}
    blind = _unwatched(audit) if audit else dict.fromkeys(INVARIANTS, "the audit has ended, or did not begin")
    found = []
    for name, invariant in INVARIANTS.items():
        if name in broken:
            found.append(Rule(name, "noted" if invariant.is_note else "broken"))
        elif name in ledger.accepted:
            found.append(Rule(name, "accepted"))
        else:
            found.append(Rule(name, "not watched", blind[name]) if name in blind else Rule(name, "kept"))
    return tuple(found)


def rules_of(part: Part) -> list[str]:
    """Return the rules that a part of an audit looks at: those that the first line of its docstring names."""
    title = (part.doc or "").partition("\n")[0].partition(":")[0]
    named = re.findall(r"[a-z-]+", title)
    return [name for name in INVARIANTS if name in named]


def _unwatched(audit: Audit) -> dict[str, str]:
    """Return, by rule that is not watched, why."""
    found = {name: reason for name, reason in NEEDS.items() if name not in audit.ledger.met}
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
    name = f"audit.{part.name}"
    records = [record for record in this_process().records if record.name == name]
    if records and not any(record.status is Status.APPLIED for record in records):
        yield "nothing that it watches was imported"
    for record in records:
        if record.status in (Status.REFUSED, Status.FAILED):
            yield f"{record.where}: {record.reason}"
