"""megapatch audit FOLDER: the reports of all ranks, with each finding once, as text, as JSON and as a page."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from .._printable import clean
from .._reporting import files, terminal
from .._reporting.numbers import numbered
from .._reporting.terminal import COULD_NOT_LOOK, NOT_WELL, WELL
from ..audit._report import KIND
from ..audit._summary import Summary, checked, headline, summarize, texts

_STYLE = """\
:root { color-scheme: light dark; --finding: #c62828; --note: #b26a00; --event: #1565c0; }
@media (prefers-color-scheme: dark) { :root { --finding: #ff8a80; --note: #ffc168; --event: #82b1ff; } }
body { font: 15px/1.45 sans-serif; margin: 0 auto; padding: 16px 24px; max-width: 1200px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
table { width: 100%; border-collapse: collapse; } th { font-weight: normal; text-align: left; width: 30%; }
td div { position: relative; height: 14px; margin: 3px 8px; }
i { position: absolute; top: 0; height: 14px; min-width: 8px; border-radius: 3px; }
.finding { background: var(--finding); } .note { background: var(--note); } .event { background: var(--event); }"""


def audit(folder: str, as_json: bool, html: str | None) -> int:
    """Print the summary of the reports in a folder; return an exit code.

    Args:
        as_json: print JSON instead of text.
        html: where to write the page; None for nowhere.
    """
    summary, unreadable = read(Path(folder))
    code = _code(summary, unreadable)
    if as_json:
        terminal.write_json({**summary.to_dict(), "unreadable": unreadable, "exit_code": code})
    elif summary.ranks:
        terminal.write("\n\n".join(texts(summary, terminal.width())))
    for sentence in unreadable:
        terminal.note(sentence)
    if not (summary.ranks or unreadable):
        terminal.note(f"{folder} holds no {KIND}-*.json: run with MEGAPATCH_AUDIT=1 and MEGAPATCH_REPORT={folder}")
    if html is not None and summary.ranks:
        return code if _write(html, page(summary, unreadable)) else COULD_NOT_LOOK
    return code


def read(folder: Path) -> tuple[Summary, list[str]]:
    """Return the summary of the reports in a folder, and a sentence for each that is missing or cannot be read."""
    attempts, unreadable = files.read_attempts(folder, KIND, checked)
    return summarize(attempts), unreadable


def _code(summary: Summary, unreadable: list[str]) -> int:
    if any(attempt.findings for attempt in summary.attempts):
        return NOT_WELL
    was_killed = any(attempt.not_ended for attempt in summary.attempts)
    return COULD_NOT_LOOK if unreadable or not summary.ranks or was_killed else WELL


def _write(path: str, html: str) -> bool:
    """Write the page, say where it is, and return whether that was possible."""
    terminal.flush()  # the page may go where the text goes
    try:
        Path(path).write_text(html, encoding="utf-8")
    except OSError as error:
        terminal.note(f"{path} cannot be written: {error.strerror}")
        return False
    terminal.note(f"page written to {path}")
    return True


# ------------------------------------------------------------------------ the page
def page(summary: Summary, unreadable: Iterable[str]) -> str:
    """Return a page without scripts and without anything that is loaded: each attempt's timeline, and its text.

    Args:
        unreadable: a sentence for each report that is missing or cannot be read.
    """
    attempts = zip(summary.attempts, texts(summary, terminal.NO_TERMINAL), strict=True)
    body = [f"{_timeline(attempt)}\n<pre>{_shown(text)}</pre>" for attempt, text in attempts]
    body += [f"<pre>{_shown(sentence)}</pre>" for sentence in unreadable]
    head = f'<meta charset="utf-8">\n<title>megapatch audit: {_shown(headline(summary))}</title>'
    return "\n".join(
        (
            f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}',
            f"<style>\n{_STYLE}\n</style>\n</head>\n<body>",
            *body,
            "</body>\n</html>\n",
        )
    )


def _timeline(summary: Summary) -> str:
    """Return a table with a row for each finding, note and kind of event, over the steps of the run."""
    rows = [f"<tr><th>optimizer steps</th><td>0 to {summary.steps:,}</td></tr>"]
    for found in summary.found:
        kind, a_note = ("note", " (a note)") if found.is_note else ("finding", "")
        rows.append(
            _row(f"{found.rule}{a_note}", kind, found.ranks, [(found.step, found.last_step)], summary.steps)
        )
    for events in summary.events:
        marks = [(step, step) for step in dict.fromkeys(events.steps)]
        rows.append(_row(events.kind, "event", events.ranks, marks, summary.steps))
    return "\n".join(["<table>", *rows, "</table>"])


def _row(name: str, kind: str, ranks: list[int], marks: Iterable[tuple[int, int]], steps: int) -> str:
    """Return a row of the timeline: of each mark, from one step to another, the place is a part of the width."""
    most, label = max(steps, 1), _shown(f"{name}, {numbered('rank', ranks)}")
    drawn = "".join(
        f'<i class="{kind}" style="left:{first / most:.1%};width:{(last - first) / most:.1%}"></i>'
        for first, last in marks
    )
    return f"<tr><th>{label}</th><td><div>{drawn}</div></td></tr>"


def _shown(text: str) -> str:
    """Return other people's text as HTML that shows it."""
    return escape(clean(text))
