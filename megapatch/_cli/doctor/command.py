"""megapatch doctor: import the patched modules, and show each site's status and the reason for it.

`--report` writes for an issue, as Markdown, what is fine to publish of it: see `issue`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
from pathlib import Path

from ..._engine import advice
from ..._engine.engine import this_process
from ..._reporting import terminal
from ..._reporting.check import compare_files
from ..._reporting.report import Report
from ..._reporting.terminal import COULD_NOT_LOOK, NOT_WELL, WELL
from ...patch import PatchInfo, Status
from .examination import Examination, examine
from .issue import markdown

EXIT_CODES = """\
exit codes:
  0  every patch that is needed is in place, or was switched off on purpose
  1  a patch that is needed, or may be, is not in place (failed, refused,
     missed, overwritten), on any rank with FOLDER; or ranks differ
  2  could not look: bad usage or environment, nothing to patch is installed, or
     it cannot be imported; or the file for --report exists already or cannot be
     written
"""


def doctor(as_json: bool, importing: bool = True, report_file: str | None = None) -> int:
    """Import each installed target, print the findings and the problems; return one of `EXIT_CODES`.

    Args:
        as_json: print JSON instead of text.
        importing: whether to import the targets; without, nothing is diagnosed.
        report_file: where to write a report for an issue; ``-`` is standard output, in place of the text.
    """
    if report_file not in (None, "-") and os.path.lexists(report_file):
        terminal.note(f"{report_file} exists already; name another file: megapatch doctor --report FILE")
        return COULD_NOT_LOOK
    logging.getLogger("megapatch").setLevel(logging.CRITICAL)  # the report has what it would warn of
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there is no standard error
        faulthandler.enable()  # a target that kills the process as it is imported is named
    columns = terminal.width()
    output = terminal.reserve()  # targets may print what they like when they are imported
    found = examine(importing)
    if report_file == "-":
        terminal.write(markdown(found).rstrip("\n"), file=output)
    elif as_json:
        terminal.write_json(found.to_dict(), file=output)
    else:
        terminal.write(found.text(columns), file=output)
    terminal.flush(output)
    _note_what_is_off(found.report)
    _note_problems(found)
    code = found.exit_code
    if report_file not in (None, "-"):
        code = _write_report(report_file, found) or code
    if found.exit_code == WELL and not as_json and report_file != "-":
        terminal.write(_conclusion(found.report), file=output)
    terminal.flush(output)
    return code


def compare(folder: str, as_json: bool) -> int:
    """Compare the files that the ranks of a run wrote to a folder; return one of `EXIT_CODES`."""
    found = compare_files(Path(folder))
    if as_json:
        terminal.write_json(terminal.document(**found._asdict()))
    else:
        for sentence in (*found.common, *found.differing, *found.not_in_place):
            terminal.fill(sentence, terminal.width(), rest="  ")
    for sentence in found.unreadable:
        terminal.note(sentence)
    if found.unreadable or len(found.common) < 2:
        if not found.unreadable:
            terminal.note(
                f"{folder} holds no rank-*.json: run with MEGAPATCH_REPORT={folder} and megapatch.check()"
            )
            if next(Path(folder).glob("audit-*.json"), None):
                terminal.note(f"it holds the audit's reports, which `megapatch audit {folder}` shows")
        return COULD_NOT_LOOK
    if found.differing or found.not_in_place:
        return NOT_WELL
    if not as_json:
        terminal.write("all ranks are alike, and every patch that they need is in place")
    return WELL


def _conclusion(report: Report) -> str:
    """Say that all is well only where a diagnosis has run: without imports, or where all is off, none does."""
    if all(site.verdict is None for patch in report.patches for site in patch.sites):
        return "nothing was diagnosed, so this does not say whether all is well"
    or_off = any(patch.status is Status.DISABLED for patch in report.patches)
    return f"all well: every patch that is needed is in place{' or switched off on purpose' if or_off else ''}"


def _note_what_is_off(report: Report) -> None:
    off: dict[str, list[PatchInfo]] = {}
    for patch in report.patches:
        if patch.status is Status.DISABLED:
            off.setdefault(patch.reason, []).append(patch.patch)
    for reason, patches in off.items():
        terminal.note(f"disabled on purpose: {report.names(patches)} ({reason})")


def _note_problems(found: Examination) -> None:
    """Print the problems, and once the remedy for all patches that are not in place."""
    for problem in found.problems:
        terminal.note(problem)
    bad = [
        patch.patch for patch in found.report.patches if any(site.status.needs_attention for site in patch.sites)
    ]
    for patch in bad:
        terminal.note(f"{patch.name}: {advice.at_risk(patch)}")
    if bad:
        settings = this_process().settings
        terminal.note(advice.acceptance([patch.name for patch in bad], settings.disable))
        terminal.note(advice.report_it())


def _write_report(path: str, found: Examination) -> int:
    """Write the report for an issue, and say where it is; return an exit code."""
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(markdown(found))
    except OSError as error:
        terminal.note(f"{path} cannot be written: {error.strerror}")
        return COULD_NOT_LOOK
    terminal.note(
        f"report written to {os.path.abspath(path)}; read it through, then attach it to an issue "
        f"({advice.ISSUE_TRACKER})"
    )
    return WELL
