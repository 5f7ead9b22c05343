"""The report that `megapatch doctor --report` writes for an issue, as Markdown, without user names and secrets."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
import sys

from ..._engine.advice import ISSUE_TRACKER
from ..._printable import clean, one_line
from .examination import Examination
from .origins import RELEVANT

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
        [f"For {ISSUE_TRACKER}. Please add what you ran, what you expected, and what happened."],
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
