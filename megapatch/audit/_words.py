"""A summary of the audit's reports, as text for people."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from .._engine.settings import ACCEPT
from .._ranks import numbered
from .._reporting.terminal import width, wrapped
from ._findings import steps
from ._summary import Events, Found, Summary

_NAMES = MappingProxyType({"version": "megapatch", "size": "number of ranks", "steps": "optimizer steps"})
"""Of a summary's values that have other names in words."""
_LINES = 3
"""Of the user's code, the innermost."""


def text(summary: Summary, columns: int | None = None) -> str:
    """Return the summary in lines of at most `columns`, by default the terminal's."""
    columns = columns or width()
    return "\n\n".join(
        "\n".join(line for each in _lines(title, attempt) for line in _fitted(each[0], columns, *each[1:]))
        for title, attempt in titled(summary)
    )


def _fitted(words: str, columns: int, first: str, rest: str) -> list[str]:
    return wrapped(words, columns, first, rest) if words else [""]


def titled(summary: Summary) -> Iterator[tuple[str, Summary]]:
    """Yield the attempts, each with its headline."""
    count = len(summary.attempts)
    for number, attempt in enumerate(summary.attempts, 1):
        yield f"attempt {number} of {count}: {headline(attempt)}" if count > 1 else headline(attempt), attempt


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
    """Yield version, digest, size, steps and settings of the ranks, and which of them differ."""
    of_all = {_NAMES.get(name, name): ranks for name, ranks in summary.values.items() if name != "ended"}
    yield ", ".join(f"{name} {next(iter(by_value))}" for name, by_value in of_all.items() if len(by_value) == 1)
    for name, by_value in of_all.items():
        if len(by_value) > 1:
            differing = "; ".join(f"{value} on {numbered('rank', ranks)}" for value, ranks in by_value.items())
            yield f"{name} {differing}"
    if summary.not_ended:
        yield f"written before the end of the process: {numbered('rank', summary.not_ended)}"


def when(found: Found) -> str:
    """Say on which ranks and in which steps it was seen."""
    first, last_step = found.spans[0], max(span.last_step for span in found.spans)
    at_first = f" (first on {numbered('rank', first.ranks)})" if len(found.spans) > 1 else ""
    times = f", {found.times} times until step {last_step}" if found.times > 1 else ""
    return f"{numbered('rank', found.ranks)}, after {steps(first.step)}{at_first}{times}"


def sentences(found: Found) -> Iterator[str]:
    """Yield what ranks have seen; the ranks of each sentence where they differ."""
    for sentence in found.sentences:
        yield (
            sentence.what if len(found.sentences) == 1 else f"{numbered('rank', sentence.ranks)}: {sentence.what}"
        )
    if found.others:
        yield f"and {found.others} more"


def happened_before(found: Found) -> Iterator[str]:
    """Say what happened between the step before and this one."""
    if found.before:
        yield f"since the step before: {'; '.join(found.before)}"


def advice(found: Found) -> Iterator[str]:
    """Yield what to do besides looking for a cause: the patches, and how to accept a note."""
    if found.patches:
        lacking = ", ".join(f"{patch['name']} ({patch['reason']})" for patch in found.patches)
        yield f"patches for known causes that are not in place here: {lacking}"
    if found.is_note:
        yield f"if that is meant: {ACCEPT}={found.rule}"


def happened(events: Events) -> str:
    """Say how often something has happened, in which steps, and on which ranks."""
    whats = f" ({', '.join(events.whats[:4])})" if events.whats else ""
    times = "once" if events.times == 1 else f"{events.times} times"
    after = numbered("step", list(dict.fromkeys(events.steps)))
    return f"{events.kind}{whats}: {times}, after {after}, on {numbered('rank', events.ranks)}"


def _lines(title: str, summary: Summary) -> Iterator[tuple[str, str, str]]:
    """Yield lines, with what to put before the first and before the others when they are wrapped."""
    yield title, "", "  "
    for line in values(summary):
        yield line, "", "  "
    for found in summary.found:
        yield "", "", ""
        yield f"{found.rule}{' (a note)' if found.is_note else ''}: {when(found)}", "", "  "
        for line in (*sentences(found), found.means, *happened_before(found)):
            yield line, "  ", "    "
        for line in found.where[: -_LINES - 1 : -1]:
            yield f"at {line}", "  ", "    "
        if found.causes:
            yield "likely causes, in order, and what shows each:", "  ", "    "
        for number, cause in enumerate(found.causes, 1):
            yield f"{number}. {cause['cause']}", "    ", "       "
            yield cause["check"], "       - ", "         "
        for line in advice(found):
            yield line, "  ", "    "
    if summary.events:
        yield "", "", ""
    for events in summary.events:
        yield happened(events), "", "  "
    yield "", "", ""
    broken = {found.rule for found in summary.found}
    for status, by_rule in summary.rules.items():
        names = [
            name if len(ranks) == len(summary.ranks) else f"{name} on {numbered('rank', ranks)}"
            for name, ranks in by_rule.items()
            if name.partition(" ")[0] not in broken
        ]
        if names:
            yield f"{status}: {', '.join(names)}", "", "  "
