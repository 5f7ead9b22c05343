"""A summary of the audit's reports, as text for people: on a terminal, and in the page."""

from __future__ import annotations

from collections.abc import Iterator

from .._engine.settings import ACCEPT
from .._ranks import numbered
from .._reporting.terminal import counted, wrapped
from ._findings import steps
from ._summary import Events, Found, Summary


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
    return wrapped(words, columns, indent, f"{indent}  ") if words else [""]


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
