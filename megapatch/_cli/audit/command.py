"""megapatch audit FOLDER: read the reports of all ranks, and print their findings, each once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._reporting import files, terminal
from ...audit._summary import KIND, Summary, summarize
from ...audit._words import text
from .page import page

NOTHING_FOUND, FOUND, COULD_NOT_LOOK = 0, 1, 2


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
        terminal.write(text(summary))
    for sentence in unreadable:
        terminal.note(sentence)
    if not (summary.ranks or unreadable):
        terminal.note(f"{folder} holds no {KIND}-*.json: run with MEGAPATCH_AUDIT=1 and MEGAPATCH_REPORT={folder}")
    if html is not None and summary.ranks:
        return code if _write(html, page(summary, unreadable)) else COULD_NOT_LOOK
    return code


def read(folder: Path) -> tuple[Summary, list[str]]:
    """Return the summary of the reports in a folder, and a sentence for each that is missing or cannot be read."""
    unreadable: list[str] = []
    reports: list[Mapping[str, Any]] = []
    for path, data in files.read(folder, KIND, unreadable):
        try:
            summarize([data])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            unreadable.append(files.cannot_be_read(path, error))
        else:
            reports.append(data)
    summary = summarize(reports)
    for attempt in summary.attempts:
        unreadable += files.without_a_file(folder, attempt.ranks, attempt.size)
    return summary, unreadable


def _code(summary: Summary, unreadable: list[str]) -> int:
    if any(attempt.findings for attempt in summary.attempts):
        return FOUND
    return COULD_NOT_LOOK if unreadable or not summary.ranks or summary.not_ended else NOTHING_FOUND


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
