"""The report for an issue: only what is known to be fine to publish, so that no secret has to be recognized.

That is versions, commits, names of patches, modules and functions, statuses, megapatch's own sentences, and where
exceptions came from. Of variables it has numbers, names of patches, and other words that megapatch knows. It has
no messages of exceptions, and no sentences and paths of others.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator

from ..._engine import advice
from ..._engine.complaints import WORDS, unknown_variables
from ..._engine.settings import matching
from ..._printable import clean
from ..._reporting.report import INDENT, PatchReport, Report, SiteReport
from ..._reporting.terminal import counted
from ...audit import RULES
from ...patch import Status
from ...patches._catalogue import CATALOGUE, RETIRED
from .examination import Examination

_OURS = {*CATALOGUE, "audit"}
"""Families whose reasons are megapatch's own words."""
_NAME = re.compile(r"[\w.:*]{1,200}( \((source|\d+)\))?|[\w.-]{1,100}", re.ASCII)
"""A dotted name, a target, a distribution, or patches of a family (with their number)."""
_VERSION = re.compile(r"-|v?\d[\w.!+-]{0,60}( \(source\))?|[0-9a-f]{7,64}", re.ASCII)
"""A version (of a source), a commit, or neither."""
_WORD = re.compile(r"@?[\w.*-]+", re.ASCII)
_RAISED = r"(cannot be imported: |it raises )([\w.]+)(.*)"
_FAILED = r"()([\w.]+)(.*)"
"""An exception as a reason ends with it: its type and its message. The reason of a failed site is nothing else."""
_OF_NAMES = re.compile(
    r"No module named '[\w.]+'|cannot import name '\w+' from '[\w.]+'|name '\w+' is not defined"
    r"|(?:module|type object) '[\w.]+' has no attribute '\w+'|'\w+' object has no attribute '\w+'"
)
"""Python's own messages, which hold names and no values."""
_FRAME = re.compile(r'  File "(.+)", line (\d+), in ([\w<>.]+)', re.ASCII)


def markdown(found: Examination) -> str:
    """Return everything an issue needs."""
    packages = [
        f"| {_names(package.name)} | {_names(package.version or '-', _VERSION)} | {package.origin} "
        f"| {_names(package.commit or '-', _VERSION)} |"
        for package in found.packages
    ]
    words = {*WORDS, *RULES, *RETIRED, *(patch.patch.name for patch in found.report.patches)}
    settings = [f"- `{name}={_of_words(value, words)}`" for name, value, _ in found.settings]
    settings += [f"- {sentence}" for sentence in unknown_variables(os.environ)]
    parts = [
        ["# megapatch doctor"],
        [f"For {advice.ISSUE_TRACKER}. Please add what you ran, what you expected, and what happened."],
        [
            "## Platform",
            "",
            f"- {platform.platform()}, {os.cpu_count()} CPUs",
            f"- {platform.python_implementation()} {' '.join(sys.version.split())}",
        ],
        ["## Packages", "", "| package | version | origin | commit |", "| --- | --- | --- | --- |", *packages],
        ["## Settings", "", *(settings or ["No MEGAPATCH_* variable is set."])],
        ["## Patches", "", "````text", *_patches(found.report), "````"],
        [f"Digest {found.report.digest}, {counted(len(found.problems), 'problem')}, exit code {found.exit_code}."],
    ]
    return clean("\n\n".join("\n".join(part) for part in parts) + "\n")


def _patches(report: Report) -> Iterator[str]:
    elsewhere = (Status.NOT_INSTALLED, Status.DISABLED)
    for patch in report.patches:
        if patch.status not in elsewhere:
            yield from _patch(patch)
    for status in elsewhere:
        if patches := [patch.patch for patch in report.patches if patch.status is status]:
            yield f"{status.value}: {_names(report.names(patches))}"


def _patch(patch: PatchReport) -> Iterator[str]:
    yield f"{patch.status.value:{INDENT}}{_names(patch.patch.name)}"
    for site in patch.sites:
        if site.status is not Status.NOT_INSTALLED:
            yield f"  {_names(site.module)}: {site.status.value}"
            if patch.patch.family in _OURS and site.status is not Status.DISABLED:
                yield f"    {_without_messages(site.reason, _FAILED if site.status is Status.FAILED else _RAISED)}"
            yield from (f"    {line}" for line in _facts(site))


def _facts(site: SiteReport) -> Iterator[str]:
    yield from (f"replaced {_names(target)}" for target in site.targets)
    for what, where in (("rebound", site.rebound), ("out of reach", site.out_of_reach), ("foreign", site.foreign)):
        if where:
            yield f"{what}: {len(where)}"
    for line in (site.traceback or "").splitlines():
        if (frame := _FRAME.fullmatch(line)) and (frame[1] == "<string>" or os.path.isfile(frame[1])):
            yield f"  {_below_the_path(frame[1])}:{frame[2]} in {frame[3]}"


def _names(text: str, pattern: re.Pattern[str] = _NAME) -> str:
    """Return a text of names, or what the pattern is for, with commas between them; nothing of another text."""
    return text if all(pattern.fullmatch(part.strip()) for part in text.split(",")) else "(left out)"


def _of_words(text: str, words: Iterable[str]) -> str:
    """Return a variable's value if it is of numbers, and of these words or globs of them."""
    parts = [part.strip() for part in text.split(",")]
    known = all(part.isdecimal() or (_WORD.fullmatch(part) and matching(part, words)) for part in parts)
    return text if known else "(left out)"


def _without_messages(text: str, pattern: str) -> str:
    """Return a sentence of megapatch's, with the type alone of an exception that it ends with."""

    def shown(error: re.Match[str]) -> str:
        message = _OF_NAMES.match(error[3].removeprefix(": "))
        return f"{error[1]}{error[2]}" + (f": {message[0]}" if message else "")

    return re.sub(pattern, shown, text, count=1, flags=re.DOTALL)


def _below_the_path(path: str) -> str:
    """Return a file's path as an import finds it: a folder above may have a user's name."""
    folders = [folder for folder in sys.path if folder and path.startswith(os.path.join(folder, ""))]
    return os.path.relpath(path, max(folders, key=len)) if folders else os.path.basename(path)
