"""The reports of all ranks of a run in one, as data and as text: what several ranks have found is there once.

Works on the dictionaries that `AuditReport.to_dict` makes, perhaps with another version of megapatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .._engine.settings import ACCEPT
from .._reporting import files
from .._reporting.numbers import numbered
from .._reporting.terminal import SCHEMA, counted, document, wrapped
from ._findings import steps

_MOST = 8
"""Different sentences of a finding: each pipeline stage names its own parameters."""
_FOUND = {
    **dict.fromkeys(("rule", "what", "means"), str),
    **dict.fromkeys(("step", "last_step", "count"), int),
    "where": [str],
    "causes": [{"cause": str, "check": str}],
    "patches": [{"name": str, "reason": str}],
}
_EVENTS = [{"step": int, "what": str}]
_SHAPE = {
    "schema": int,
    "version": str,
    "digest": str,
    "steps": int,
    "rules": [{"name": str, "status": str, "reason": str}],
    "findings": [_FOUND],
    "notes": [_FOUND],
    "events": {str: {"count": int, "first": _EVENTS, "last": _EVENTS}},
}
"""The keys of a report that are summarized, with their types. The reader of files has checked rank and size."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A way in which a rule was broken at one line of the user's code; docs/audit.md has what is in it."""

    rule: str
    means: str
    is_note: bool
    ranks: list[int]
    sentences: list[dict[str, Any]]
    others: int
    step: int
    last_step: int
    first_on: list[int]
    times: int
    where: list[str]
    before: list[str]
    causes: list[dict[str, str]]
    patches: list[dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Events:
    """The events of a kind, alike on some ranks: how often, after which steps, and what, without repetitions."""

    kind: str
    ranks: list[int]
    times: int
    steps: list[int]
    whats: list[str]


@dataclasses.dataclass(frozen=True)
class Summary:
    """The reports of some ranks; docs/audit.md has what is in it.

    In `rules` a name is followed by the reason why the rule is not watched, or by how many things it has judged,
    on the rank with the fewest.
    """

    ranks: list[int]
    size: int
    values: dict[str, dict[str, list[int]]]
    steps: int
    found: list[Found]
    rules: dict[str, dict[str, list[int]]]
    events: list[Events]
    earlier: tuple[Summary, ...] = ()

    @property
    def attempts(self) -> tuple[Summary, ...]:
        """All of them, in the order in which they began."""
        return (*self.earlier, self)

    @property
    def findings(self) -> list[Found]:
        """Those that are not notes."""
        return [found for found in self.found if not found.is_note]

    @property
    def not_ended(self) -> list[int]:
        """The ranks that wrote before their end: a run that goes on, or was killed."""
        return self.values.get("ended", {}).get("False", [])

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return document(**dataclasses.asdict(self))


def checked(report: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's report; raise if its layout is another one, or something in it is not what is expected."""
    files.expect(report, _SHAPE)
    if report["schema"] != SCHEMA:
        raise ValueError(f"its layout is {report['schema']}, and this megapatch reads {SCHEMA}")
    return report


def summarize(attempts: Iterable[Sequence[Mapping[str, Any]]]) -> Summary:
    """Return the summary of the reports of some ranks: that of the latest attempt, with the earlier ones in it."""
    *earlier, latest = map(_summary_of, attempts)
    return dataclasses.replace(latest, earlier=tuple(earlier))


def _summary_of(reports: Sequence[Mapping[str, Any]]) -> Summary:
    reports = sorted(reports, key=lambda report: report["rank"])
    values: dict[str, dict[str, list[int]]] = {}
    for report in reports:
        for name in ("version", "digest", "size", "steps", "settings", "ended"):
            values.setdefault(name, {}).setdefault(_in_words(report.get(name)), []).append(report["rank"])
    return Summary(
        ranks=[report["rank"] for report in reports],
        size=max((report["size"] for report in reports), default=0),
        values=values,
        steps=max((report["steps"] for report in reports), default=0),
        found=[*_found(reports, "findings"), *_found(reports, "notes")],
        rules=_rules(reports),
        events=_events(reports),
    )


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_in_words(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _rules(reports: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list[int]]]:
    rules: dict[str, dict[str, list[int]]] = {}
    least: dict[str, dict[str, int]] = {}
    for report in reports:
        for rule in report["rules"]:
            name, reason = rule["name"], f" ({rule['reason']})" if rule["reason"] else ""
            counts = least.setdefault(name, {})
            of_old = {rule.get("judges", "things"): rule.get("judged", 0)}
            for what, count in (rule.get("counts") or of_old).items():
                counts[what] = min(counts.get(what, 2**62), int(count))
            rules.setdefault(rule["status"], {}).setdefault(f"{name}{reason}", []).append(report["rank"])
    kept = {f"{name} ({_counted(least[name])})": ranks for name, ranks in rules.get("kept", {}).items()}
    return {**rules, "kept": kept} if kept else rules


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" if count else f"no {what}" for what, count in counts.items())


def _found(reports: Iterable[Mapping[str, Any]], key: str) -> list[Found]:
    """Return the findings, or notes, of all ranks by rule, kind and line, in the order in which they began."""
    alike: dict[tuple[str, str, str], list[tuple[int, Mapping[str, Any]]]] = {}
    for report in reports:
        for each in report[key]:
            place = each["rule"], each.get("kind", ""), "".join(each["where"][-1:])
            alike.setdefault(place, []).append((report["rank"], each))
    found = [_merged(rule, members, is_note=key == "notes") for (rule, *_), members in alike.items()]
    return sorted(found, key=lambda each: each.step)


def _merged(rule: str, members: list[tuple[int, Mapping[str, Any]]], is_note: bool) -> Found:
    sentences: dict[str, list[int]] = {}
    for rank, each in members:
        sentences.setdefault(each["what"], []).append(rank)
    first, step = members[0][1], min(each["step"] for _, each in members)
    patches = {patch["name"]: dict(patch) for _, each in members for patch in each["patches"]}
    return Found(
        rule=rule,
        means=first["means"],
        is_note=is_note,
        ranks=list(dict.fromkeys(rank for rank, _ in members)),
        sentences=[{"what": what, "ranks": ranks} for what, ranks in list(sentences.items())[:_MOST]],
        others=max(0, len(sentences) - _MOST),
        step=step,
        last_step=max(each["last_step"] for _, each in members),
        first_on=list(dict.fromkeys(rank for rank, each in members if each["step"] == step)),
        times=max(each["count"] for _, each in members),
        where=list(first["where"]),
        before=list(first.get("before", ())),
        causes=[dict(cause) for cause in first["causes"]],
        patches=list(patches.values()),
    )


def _events(reports: Iterable[Mapping[str, Any]]) -> list[Events]:
    alike: dict[tuple[str, int, tuple[int, ...]], Events] = {}
    for report in reports:
        for kind, events in report["events"].items():
            kept = [*events["first"], *events["last"]]
            steps, times = [event["step"] for event in kept], events["count"]
            whats = list(dict.fromkeys(event["what"] for event in kept if event["what"]))
            known = alike.setdefault((kind, times, tuple(steps)), Events(kind, [], times, steps, whats))
            known.ranks.append(report["rank"])
    order = list(dict.fromkeys(events.kind for events in alike.values()))
    return sorted(alike.values(), key=lambda events: order.index(events.kind))


# ------------------------------------------------------------------------ as text for people
def texts(summary: Summary, columns: int) -> list[str]:
    """Return a text for each attempt, in lines of at most `columns`, of which the first has what was found."""
    count, found = len(summary.attempts), []
    for number, attempt in enumerate(summary.attempts, 1):
        lines = [f"attempt {number} of {count}: {headline(attempt)}" if count > 1 else headline(attempt)]
        lines += _lines(attempt)
        found.append("\n".join(part for line in lines for part in _fitted(line, columns)))
    return found


def headline(summary: Summary) -> str:
    """Say how much was found, in a line."""
    findings = len(summary.findings)
    counts = ((findings, "finding"), (len(summary.found) - findings, "note"))
    found = " and ".join(counted(count, noun) for count, noun in counts if count)
    return f"{found or 'nothing found'} in {steps(summary.steps)} on {numbered('rank', summary.ranks)}"


def happened(events: Events) -> str:
    """Say how often something has happened, in which steps, and on which ranks."""
    whats = f" ({', '.join(events.whats[:4])})" if events.whats else ""
    times = "once" if events.times == 1 else f"{events.times} times"
    after = numbered("step", list(dict.fromkeys(events.steps)))
    return f"{events.kind}{whats}: {times}, after {after}, on {numbered('rank', events.ranks)}"


def _fitted(line: str, columns: int) -> list[str]:
    """Return a line as several, of which all but the first are indented by two more columns."""
    words = line.lstrip()
    indent = line[: len(line) - len(words)]
    return wrapped(words, columns, indent, f"{indent}  ")


def _lines(summary: Summary) -> Iterator[str]:
    yield from _values(summary)
    for found in summary.found:
        yield ""
        yield from _of_found(found)
    yield from ["", *map(happened, summary.events)] if summary.events else ()
    yield ""
    broken = {found.rule for found in summary.found}
    for status, by_rule in summary.rules.items():
        names = [
            name if len(ranks) == len(summary.ranks) else f"{name} on {numbered('rank', ranks)}"
            for name, ranks in by_rule.items()
            if name.partition(" ")[0] not in broken
        ]
        if names:
            yield f"{status}: {', '.join(names)}"


def _values(summary: Summary) -> Iterator[str]:
    """Yield version, digest, size, steps and settings of the ranks, and which of them differ."""
    words = {"version": "megapatch", "size": "number of ranks", "steps": "optimizer steps"}
    of_all = {words.get(name, name): ranks for name, ranks in summary.values.items() if name != "ended"}
    yield ", ".join(f"{name} {next(iter(by_value))}" for name, by_value in of_all.items() if len(by_value) == 1)
    for name, by_value in of_all.items():
        if len(by_value) > 1:
            differing = "; ".join(f"{value} on {numbered('rank', ranks)}" for value, ranks in by_value.items())
            yield f"{name} {differing}"
    if summary.not_ended:
        yield f"written before the end of the process: {numbered('rank', summary.not_ended)}"


def _of_found(found: Found) -> Iterator[str]:
    at_first = f" (first on {numbered('rank', found.first_on)})" if found.first_on != found.ranks else ""
    times = f", {found.times} times until step {found.last_step}" if found.times > 1 else ""
    ranks, a_note = numbered("rank", found.ranks), " (a note)" if found.is_note else ""
    yield f"{found.rule}{a_note}: {ranks}, after {steps(found.step)}{at_first}{times}"
    for sentence in found.sentences:
        on = f"{numbered('rank', sentence['ranks'])}: " if len(found.sentences) > 1 else ""
        yield f"  {on}{sentence['what']}"
    if found.others:
        yield f"  and {found.others} more"
    yield f"  {found.means}"
    if found.before:
        yield f"  since the step before: {'; '.join(found.before)}"
    yield from (f"  at {line}" for line in found.where[:-4:-1])  # the three innermost
    if found.causes:
        yield "  likely causes, in order, and what shows each:"
    for number, cause in enumerate(found.causes, 1):
        yield f"    {number}. {cause['cause']}"
        yield f"       - {cause['check']}"
    if found.patches:
        lacking = ", ".join(f"{patch['name']} ({patch['reason']})" for patch in found.patches)
        yield f"  patches for known causes that are not in place here: {lacking}"
    if found.is_note:
        yield f"  if that is meant: {ACCEPT}={found.rule}"
