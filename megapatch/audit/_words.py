"""A summary of the audit's reports, as text for people."""

from __future__ import annotations

from collections.abc import Iterator

from .._engine.settings import ACCEPT
from .._reporting.facts import numbered
from .._reporting.terminal import width, wrapped
from ._findings import steps
from ._summary import Events, Found, Summary

_KEPT = "kept"


def text(summary: Summary, columns: int | None = None) -> str:
    """Return the summary in lines of at most `columns`, by default the terminal's."""
    columns = columns or width()
    return "\n".join(
        line for words, first, rest in _lines(summary) for line in _fitted(words, columns, first, rest)
    )


def _fitted(words: str, columns: int, first: str, rest: str) -> list[str]:
    return wrapped(words, columns, first, rest) if words else [""]


def headline(summary: Summary) -> str:
    """Say how much was found, in a line."""
    counts = [
        f"{len(group)} {noun}{'s' * (len(group) != 1)}"
        for group, noun in ((summary.findings, "finding"), (summary.notes, "note"))
        if group
    ]
    return (
        f"{' and '.join(counts) or 'nothing found'} in {steps(summary.steps)} on {numbered('rank', summary.ranks)}"
    )


def values(summary: Summary) -> Iterator[str]:
    """Yield what ranks are, and who differs: version, digest, steps, settings."""
    for name, by_value in summary.values.items():
        if name == "ended":
            if not_ended := by_value.get("False"):
                yield f"written before the end of the process: {numbered('rank', not_ended)}"
        elif len(by_value) == 1:
            yield f"{name} {next(iter(by_value))}"
        else:
            yield f"{name} " + "; ".join(
                f"{value} on {numbered('rank', ranks)}" for value, ranks in by_value.items()
            )


def when(found: Found) -> str:
    """Say on which ranks and in which steps it was seen."""
    times = f", {found.times} times until step {found.last_step}" if found.times > 1 else ""
    return f"{numbered('rank', found.ranks)}, after {steps(found.step)}{times}"


def sentences(found: Found) -> Iterator[str]:
    """Yield what ranks have seen; the ranks of each sentence where they differ."""
    for sentence in found.sentences:
        yield (
            sentence.what if len(found.sentences) == 1 else f"{numbered('rank', sentence.ranks)}: {sentence.what}"
        )
    if found.others:
        yield f"and {found.others} more"


def advice(found: Found) -> Iterator[str]:
    """Yield what to do besides looking for a cause: the patches, and how to accept a note."""
    if found.patches:
        lacking = ", ".join(f"{patch['name']} ({patch['reason']})" for patch in found.patches)
        yield f"patches for known causes that are not in place here: {lacking}"
    if found.is_note:
        yield f"if that is meant: {ACCEPT}={found.rule}"


def happened(events: Events) -> str:
    """Say how often something has happened, in which steps, and on which ranks."""
    numbers = [str(step) for step in dict.fromkeys(events.steps)]
    after = ", ".join(numbers if len(numbers) <= 6 else [*numbers[:3], "...", *numbers[-3:]])
    whats = f" ({', '.join(events.whats[:4])})" if events.whats else ""
    times = "once" if events.times == 1 else f"{events.times} times"
    return f"{events.kind}{whats}: {times}, after step {after}, on {numbered('rank', events.ranks)}"


def _lines(summary: Summary) -> Iterator[tuple[str, str, str]]:
    """Yield lines, with what to put before the first and before the others when they are wrapped."""
    yield headline(summary), "", "  "
    for line in values(summary):
        yield line, "", "  "
    for found in summary.found:
        yield "", "", ""
        yield f"{found.rule}{' (a note)' if found.is_note else ''}: {when(found)}", "", "  "
        for line in (*sentences(found), found.means):
            yield line, "  ", "    "
        for line in reversed(found.where):
            yield f"at {line}", "  ", "    "
        if found.causes:
            yield "likely causes, in order, and what shows each:", "  ", "    "
        for number, cause in enumerate(found.causes, 1):
            yield f"{number}. {cause['cause']}: {cause['check']}", "    ", "       "
        for line in advice(found):
            yield line, "  ", "    "
    if summary.events:
        yield "", "", ""
    for events in summary.events:
        yield happened(events), "", "  "
    yield "", "", ""
    for status, by_rule in summary.rules.items():
        if status in ("broken", "noted"):
            continue
        names = [
            name if status == _KEPT or len(ranks) == len(summary.ranks) else f"{name} on {numbered('rank', ranks)}"
            for name, ranks in by_rule.items()
        ]
        yield f"{status}: {', '.join(names)}", "", "  "
