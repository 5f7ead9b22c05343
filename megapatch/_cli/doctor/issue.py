"""The report that `megapatch doctor --report` writes for an issue, as Markdown, without user names and secrets."""

from __future__ import annotations

import getpass
import os
import platform
import re
import sys

from ..._engine.advice import ISSUE_TRACKER
from .examination import Examination
from .origins import RELEVANT

_COLUMNS = 100


def markdown(found: Examination) -> str:
    """Return everything an issue needs; of the environment only MEGAPATCH_* variables."""
    packages = [f"| {package.name} | {package.version or 'unknown'} | {package} |" for package in found.packages]
    settings = [
        f"- `{name}={value if len(value) <= _COLUMNS else '...'}`: {effect}"
        for name, value, effect in found.settings
    ]
    parts = [
        ["# megapatch doctor"],
        [f"For {ISSUE_TRACKER}. Please add what you ran, what you expected, and what happened."],
        [
            "## Platform",
            "",
            f"- {platform.platform()}, {os.cpu_count()} CPUs",
            f"- {platform.python_implementation()} {sys.version}",
        ],
        ["## Packages", "", "| package | version | origin |", "| --- | --- | --- |", *packages],
        ["## Patched by others", "", *([f"- {who}: `{target}`" for who, target in found.others] or ["Nothing."])],
        ["## Settings", "", *(settings or ["No MEGAPATCH_* variable is set."])],
        ["## Problems", "", *([f"- {problem}" for problem in found.problems] or ["None."])],
        ["## Patches", "", "````text", *found.report.table(_COLUMNS), "````"],
        [f"Digest {found.report.digest}, exit code {found.exit_code}."],
    ]
    return without_names("\n\n".join("\n".join(part) for part in parts) + "\n")


def without_names(text: str) -> str:
    """Return the text with home folders and the user's name as ``~``, and URLs without credentials."""
    text = re.sub(r"(?<=://)[^/@\s]+@", "", text)
    for home in sorted(
        {os.path.expanduser("~"), os.path.realpath(os.path.expanduser("~"))}, key=len, reverse=True
    ):
        if os.path.isabs(home) and home != "/":
            text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    text = re.sub(r"/(?:home|Users)/[^/\s'\"]+", "~", text)
    user = _user()
    if user and user not in {module for _, module in RELEVANT}:  # a container's user may be called ray
        text = re.sub(rf"(?<=/){re.escape(user)}(?=/)", "~", text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user id may have no name
        return ""
