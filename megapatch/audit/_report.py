"""The audit's report of this process: what was watched, and what was found, as text and as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .._engine.engine import this_process
from .._printable import clean_data
from .._ranks import place
from .._reporting import files
from .._reporting.report import make_report
from .._reporting.terminal import document, width
from .._versions import exact_version
from ..patch import Status
from ._audit import Audit, Part
from ._findings import Finding, Ledger
from ._ranks_agree import RanksAgree
from ._rules import RULES
from ._settings import Settings

KIND = "audit"
"""The beginning of the names of the ranks' files."""


class RuleStatus(NamedTuple):
    """What became of a rule in this process.

    Attributes:
        name: a key of `megapatch.audit.RULES`.
        status: ``broken``, ``noted``, ``accepted``, ``not watched``, or ``kept`` as far as it was looked at.
        reason: why it is not watched, such as that there was nothing to look at; or else "".
        judged: how many things were.
        counts: the same by what they are, as `megapatch.audit.RULES` says it.
    """

    name: str
    status: str
    reason: str = ""
    judged: int = 0
    counts: Mapping[str, int] | None = None


class AuditReport(NamedTuple):
    """The audit's rules, findings and events in this process. `print` it for people, `to_dict` is for programs.

    docs/audit.md explains its attributes, which are the keys of `to_dict`; `findings` and `notes` are as
    `megapatch.audit.findings` and `notes` return them.
    """

    version: str
    digest: str
    rank: int
    size: int
    settings: Settings | None
    steps: int
    began: float
    seconds: float
    ended: bool
    rules: tuple[RuleStatus, ...]
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    events: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary, without secrets; docs/audit.md has its keys."""
        changed = {
            "settings": self.settings._asdict() if self.settings else None,
            "rules": [{**rule._asdict(), "judges": RULES[rule.name].judges} for rule in self.rules],
            "findings": [_described(finding) for finding in self.findings],
            "notes": [_described(note) for note in self.notes],
        }
        data: dict[str, Any] = clean_data(document(**{**self._asdict(), **files.process(), **changed}))
        return data

    def __str__(self) -> str:
        from ._summary import summarize, texts  # a process that leaves its report prints none

        return "\n\n".join(texts(summarize([[self.to_dict()]]), width()))


def make(ledger: Ledger, settings: Settings | None, rules: tuple[RuleStatus, ...], ended: bool) -> AuditReport:
    """Return the report of a ledger as it is now."""
    now = place()
    if now[2] or ledger.place is None:  # torch.distributed may be gone as the process ends
        ledger.place = now
    rank, size, _ = ledger.place
    this_process().load_families(only_installed=True)
    return AuditReport(
        version=exact_version(),
        digest=make_report(this_process().records, searching=False).digest,
        rank=rank,
        size=size,
        settings=settings,
        steps=ledger.step,
        began=round(ledger.timeline.began, 3),
        seconds=ledger.timeline.seconds(),
        ended=ended,
        rules=rules,
        findings=tuple(ledger.findings()),
        notes=tuple(ledger.notes()),
        events=ledger.timeline.to_dict(),
    )


def write(folder: str, report: AuditReport) -> None:
    """Write a report for `megapatch audit`, over the one before of this process, not over another's."""
    files.write_own(Path(folder), KIND, report.rank, report.to_dict())


def _described(finding: Finding) -> dict[str, Any]:
    """Return a finding with all that is known of its rule: its reader may have another version of megapatch."""
    rule, events = RULES[finding.rule], [event.split()[0] for event in finding.before]
    return {
        **{name: value for name, value in vars(finding).items() if name != "repairs"},
        "means": rule.means,
        "causes": [cause._asdict() for cause in rule.causes_of(finding.kind, events)],
        "patches": [repair._asdict() for repair in finding.repairs],
    }


# ------------------------------------------------------------------------ what became of the rules
def statuses(ledger: Ledger, audit: Audit | None) -> tuple[RuleStatus, ...]:
    """Return all rules, in the order of the page.

    Args:
        audit: that watches this process; None if none does any more, or did.
    """
    found = {name: ("accepted", "") for name in ledger.accepted}
    found |= {each.rule: ("noted", "") for each in ledger.notes()}
    found |= {each.rule: ("broken", "") for each in ledger.findings()}
    blind = _unwatched(audit) if audit else dict.fromkeys(RULES, "the audit has ended, or did not begin")
    for name in RULES:
        found.setdefault(name, ("not watched", blind[name]) if name in blind else ("kept", ""))
    counts = {name: rule.counts(name, ledger.judged) for name, rule in RULES.items()}
    return tuple(RuleStatus(name, *found[name], sum(each.values()), each) for name, each in counts.items())


def rules_of(part: Part) -> list[str]:
    """Return the rules that a part of an audit looks at: those that the first line of its docstring names."""
    title = (part.doc or "").partition("\n")[0].partition(":")[0]
    named = re.findall(r"[a-z-]+", title)
    return [name for name in RULES if name in named]


def _unwatched(audit: Audit) -> dict[str, str]:
    """Return, by rule that is not watched, why."""
    counts = {name: rule.counts(name, audit.ledger.judged) for name, rule in RULES.items()}
    found = {name: f"no {next(iter(each))}" for name, each in counts.items() if not any(each.values())}
    if not audit.part(RanksAgree).compares:
        compared = (name for name, each in counts.items() if next(iter(each)).startswith("comparisons"))
        found.update(dict.fromkeys(compared, "ranks are not compared"))
    for part in audit.parts:
        for reason in _reasons(audit, part):
            found.update(dict.fromkeys(rules_of(part), reason))
    return found


def _reasons(audit: Audit, part: Part) -> Iterator[str]:
    """Yield why a part does not see what it looks for."""
    if any(look.__qualname__.startswith(f"{type(part).__name__}.") for look in audit.ledger.broken):
        yield "a look of it has failed; the log says how"
    records = [record for record in this_process().records if record.name == part.name]
    if records and not any(record.status is Status.APPLIED for record in records):
        yield "nothing that it watches was imported"
    for record in records:
        if record.status in (Status.REFUSED, Status.FAILED):
            yield f"{record.where}: {record.reason}"
