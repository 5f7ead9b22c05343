"""The reports of all ranks of a run in one: what several ranks have found is there once, with their numbers.

Works on the dictionaries that `AuditReport.to_dict` makes, perhaps with another version of megapatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

SCHEMA = 1
"""Version of the JSON of a report, and of a summary. It grows when a key is removed or changes its meaning."""

KIND = "audit"
"""The beginning of the names of the ranks' files."""

_MOST = 8
"""Different sentences and spans of a finding: each pipeline stage names its own parameters."""


class Sentence(NamedTuple):
    """A sentence of a finding, and the ranks that reported it."""

    what: str
    ranks: list[int]


class Span(NamedTuple):
    """How many steps some ranks had made when they first saw something, and when they last did."""

    step: int
    last_step: int
    ranks: list[int]


class Found(NamedTuple):
    """A way in which a rule was broken at one line of the user's code.

    Attributes:
        rule: its name.
        means: the damage.
        is_note: whether it may be meant.
        ranks: that have seen it.
        sentences: what they have seen: the first of them, if there are many.
        others: how many more there are.
        spans: the steps in which ranks have seen it, the first ones first.
        times: how often the rank that has seen it most has.
        where: the user's code, outermost line first.
        before: events since the step before, each with its line.
        causes: the likely ones in order, each with ``cause`` and ``check``.
        patches: that would repair a known cause, each with ``name`` and ``reason``.
    """

    rule: str
    means: str
    is_note: bool
    ranks: list[int]
    sentences: list[Sentence]
    others: int
    spans: list[Span]
    times: int
    where: list[str]
    before: list[str]
    causes: list[dict[str, str]]
    patches: list[dict[str, str]]


class Events(NamedTuple):
    """The events of a kind, alike on some ranks.

    Attributes:
        kind: of `_timeline.KINDS`.
        ranks: that have them.
        times: how often.
        steps: of those that are kept.
        whats: what they were, without repetitions.
    """

    kind: str
    ranks: list[int]
    times: int
    steps: list[int]
    whats: list[str]


class Summary(NamedTuple):
    """The reports of some ranks.

    Attributes:
        ranks: those whose report this has.
        size: how many ranks the run has.
        values: by name (version, digest, size, steps, settings, ended) the ranks of each value, in words.
        steps: the most that a rank has made.
        found: findings, then notes.
        rules: by status, then by rule: the ranks. The rule's name is followed by the reason why it is not watched,
            or by how many things were judged by it on the rank that has judged fewest.
        events: by kind, the ranks with the same ones together.
        earlier: summaries of attempts that began before, as of a job that was restarted, or of another model.
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
    def notes(self) -> list[Found]:
        """Those that are notes."""
        return [found for found in self.found if found.is_note]

    @property
    def not_ended(self) -> list[int]:
        """The ranks that wrote before their end: a run that goes on, or was killed."""
        return self.values.get("ended", {}).get("False", [])

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        plain: dict[str, Any] = _plain(self)
        return {"schema": SCHEMA, **plain}


def _plain(value: Any) -> Any:
    """Return named tuples as dictionaries, at any depth."""
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def summarize(reports: Sequence[Mapping[str, Any]]) -> Summary:
    """Return the summary of the reports of some ranks: that of the latest attempt, with the earlier ones in it.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: where something in a report is not what is expected.
    """
    if wrong := [report["schema"] for report in reports if report["schema"] != SCHEMA]:
        raise ValueError(f"its layout is {wrong[0]}, and this megapatch reads {SCHEMA}")
    *earlier, latest = map(_summary_of, _attempts(reports))
    return latest._replace(earlier=tuple(earlier))


def _attempts(reports: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the reports that belong together: of one world, and one of each rank."""
    found: list[list[Mapping[str, Any]]] = []
    latest: dict[str, list[Mapping[str, Any]]] = {}
    for report in sorted(reports, key=lambda report: float(report["began"])):
        world = str(report.get("world", ""))
        if any(report["rank"] == other["rank"] for other in latest.setdefault(world, [])):
            latest[world] = []
        if not latest[world]:
            found.append(latest[world])
        latest[world].append(report)
    return found or [[]]


def _summary_of(reports: Sequence[Mapping[str, Any]]) -> Summary:
    reports = sorted(reports, key=lambda report: int(report["rank"]))
    values: dict[str, dict[str, list[int]]] = {}
    rules: dict[str, dict[str, list[int]]] = {}
    least: dict[str, int] = {}
    for report in reports:
        rank = int(report["rank"])
        for name in ("version", "digest", "size", "steps", "settings", "ended"):
            values.setdefault(name, {}).setdefault(_in_words(report[name]), []).append(rank)
        for rule in report["rules"]:
            name = rule["name"]
            least[name] = min(least.get(name, 2**62), int(rule.get("judged", 0)))
            reason = f" ({rule['reason']})" if rule["reason"] else ""
            rules.setdefault(rule["status"], {}).setdefault(f"{name}{reason}", []).append(rank)
    judges = {rule["name"]: rule.get("judges", "things") for report in reports for rule in report["rules"]}
    kept = {f"{name} ({least[name]:,} {judges[name]})": ranks for name, ranks in rules.get("kept", {}).items()}
    rules.update({"kept": kept} if kept else {})
    return Summary(
        ranks=[int(report["rank"]) for report in reports],
        size=max((int(report["size"]) for report in reports), default=0),
        values=values,
        steps=max((int(report["steps"]) for report in reports), default=0),
        found=[
            *_found(((report, each) for report in reports for each in report["findings"]), is_note=False),
            *_found(((report, each) for report in reports for each in report["notes"]), is_note=True),
        ],
        rules=rules,
        events=_events(reports),
    )


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_in_words(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _found(seen: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]], is_note: bool) -> list[Found]:
    """Return the findings of all ranks by rule, kind and line, in the order of the steps in which they began."""
    alike: dict[tuple[str, str, str], list[tuple[int, Mapping[str, Any]]]] = {}
    for report, finding in seen:
        place = finding["rule"], finding.get("kind", ""), "".join(finding["where"][-1:])
        alike.setdefault(place, []).append((int(report["rank"]), finding))
    found = []
    for (rule, *_), members in alike.items():
        sentences: dict[str, list[int]] = {}
        for rank, finding in members:
            sentences.setdefault(finding["what"], []).append(rank)
        first = members[0][1]
        patches = {patch["name"]: dict(patch) for _, finding in members for patch in finding["patches"]}
        found.append(
            Found(
                rule=rule,
                means=first["means"],
                is_note=is_note,
                ranks=list(dict.fromkeys(rank for rank, _ in members)),
                sentences=[Sentence(*sentence) for sentence in list(sentences.items())[:_MOST]],
                others=max(0, len(sentences) - _MOST),
                spans=_spans([(rank, int(each["step"]), int(each["last_step"])) for rank, each in members]),
                times=max(int(finding["count"]) for _, finding in members),
                where=list(first["where"]),
                before=list(first.get("before", ())),
                causes=[dict(cause) for cause in first["causes"]],
                patches=list(patches.values()),
            )
        )
    return sorted(found, key=lambda each: each.spans[0].step)


def _spans(seen: list[tuple[int, int, int]]) -> list[Span]:
    """Return the spans of (rank, first step, last step): the last has the rest, if there are many."""
    alike: dict[tuple[int, int], list[int]] = {}
    for rank, step, last_step in seen:
        alike.setdefault((step, last_step), []).append(rank)
    spans = sorted(Span(*steps, ranks) for steps, ranks in alike.items())
    kept, others = spans[: _MOST - 1], spans[_MOST - 1 :]
    if others:
        ranks = sorted(rank for span in others for rank in span.ranks)
        kept.append(Span(others[0].step, max(span.last_step for span in others), ranks))
    return kept


def _events(reports: Iterable[Mapping[str, Any]]) -> list[Events]:
    alike: dict[tuple[str, int, tuple[int, ...]], Events] = {}
    for report in reports:
        for kind, events in report["events"].items():
            kept = [*events["first"], *events["last"]]
            steps = [int(event["step"]) for event in kept]
            whats = list(dict.fromkeys(event["what"] for event in kept if event["what"]))
            times = int(events["count"])
            known = alike.setdefault((kind, times, tuple(steps)), Events(kind, [], times, steps, whats))
            known.ranks.append(int(report["rank"]))
    order = {kind: number for number, kind in enumerate(dict.fromkeys(events.kind for events in alike.values()))}
    return sorted(alike.values(), key=lambda events: order[events.kind])
