"""megapatch doctor: import the patched modules, and show each site's status and the reason for it.

`--report` writes the same for an issue, as Markdown, without user names and secrets.
"""

from __future__ import annotations

import contextlib
import faulthandler
import getpass
import logging
import os
import platform
import re
import sys
from pathlib import Path

from ..._engine import advice
from ..._engine.engine import this_process
from ..._engine.record import NEEDS_ATTENTION
from ..._printable import clean, one_line
from ..._reporting import terminal
from ..._reporting.check import compare_files
from ..._reporting.report import Report
from ..._reporting.terminal import COULD_NOT_LOOK, NOT_WELL, WELL
from ...patch import PatchInfo, Status
from .examination import Examination, examine
from .origins import RELEVANT

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
        patch.patch
        for patch in found.report.patches
        if any(site.status in NEEDS_ATTENTION for site in patch.sites)
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


_COLUMNS = 100
_END = r"(?![\w-]|\.\w)"
"""No more of a name follows: carol is in `/carol`, `/carol/x` and `/carol.`, not in `/caroline` or `/carol.d`."""


def markdown(found: Examination) -> str:
    """Return everything an issue needs; of the environment only MEGAPATCH_* variables."""
    packages = [
        one_line(f"| {package.name} | {package.version or 'unknown'} | {package} |") for package in found.packages
    ]
    settings = [
        one_line(f"- `{name}={value if len(value) <= _COLUMNS else '...'}`: {effect}")
        for name, value, effect in found.settings
    ]
    others = [one_line(f"- {who}: `{target}`") for who, target in found.others]
    problems = [one_line(f"- {problem}") for problem in found.problems]
    parts = [
        ["# megapatch doctor"],
        [f"For {advice.ISSUE_TRACKER}. Please add what you ran, what you expected, and what happened."],
        [
            "## Platform",
            "",
            f"- {platform.platform()}, {os.cpu_count()} CPUs",
            one_line(f"- {platform.python_implementation()} {sys.version}"),
        ],
        ["## Packages", "", "| package | version | origin |", "| --- | --- | --- |", *packages],
        ["## Patched by others", "", *(others or ["Nothing."])],
        ["## Settings", "", *(settings or ["No MEGAPATCH_* variable is set."])],
        ["## Problems", "", *(problems or ["None."])],
        ["## Patches", "", "````text", *found.report.table(_COLUMNS), "````"],
        [f"Digest {found.report.digest}, exit code {found.exit_code}."],
    ]
    return without_names("\n\n".join("\n".join(part) for part in parts) + "\n")


def without_names(text: str) -> str:
    """Return printable text with home folders and the user's name as ``~``, and without secrets."""
    text = clean(text)
    for home in sorted(
        {os.path.expanduser("~"), os.path.realpath(os.path.expanduser("~"))}, key=len, reverse=True
    ):
        if os.path.isabs(home) and home != "/":
            text = re.sub(rf"{re.escape(home)}{_END}", "~", text)
    text = re.sub(r"(?i:/home|/users|[a-z]:\\+users)[/\\]+[^/\\\s'\"]+", "~", text)
    for user in _users():
        text = re.sub(rf"(?<=[/\\~]){re.escape(user)}{_END}|(?<![\w.-]){re.escape(user)}(?=@)", "~", text)
    return text


def _users() -> set[str]:
    """Return the names that this user may go by."""
    found = {os.environ.get(name, "") for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "SUDO_USER")}
    with contextlib.suppress(KeyError, OSError, ImportError):  # a container's user id may have no name
        found.add(getpass.getuser())
    with contextlib.suppress(KeyError, OSError, ImportError):
        import pwd

        found.add(pwd.getpwuid(os.getuid()).pw_name)
    packages = {module for _, module in RELEVANT}  # a container's user may be called ray
    return {user for user in found if user and user not in packages}
