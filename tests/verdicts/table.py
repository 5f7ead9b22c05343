"""docs/verdicts.md, written and read: it is the only place where verdicts are kept.

Its first part shows the same verdicts by release: the patches that each one needs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple

from megapatch.patch import Patch

from . import needs
from .releases import PACKAGES, Release, project_of

INTRODUCTION = """\
# What each patch says of each release

[Your release](#your-release) has the patches that it needs in one row; below it, each patch has its verdicts.

`tox -e verdicts` writes this page: it loads each release's own code, in a process of its own, and asks every
diagnosis. CI asks those of the releases that it installs, and fails where this page says something else. No
version number is looked at. The releases are the lines of `tests/verdicts/releases.txt`; tags and commits are
checkouts (`tox -e verdicts -- slime==v0.3.1=folder`), and keep what is here where none is given.

| verdict | meaning |
| --- | --- |
| `needed` | the defect is there, in a shape that the patch knows: it is applied |
| `fixed` | upstream has repaired it |
| `absent` | this release has no such feature |
| `unsupported` | known, and megapatch does not patch it |
| `unknown` | looks like nothing known: the patch refuses, and says so |
"""


class Cell(NamedTuple):
    """A diagnosis's verdict on one release, and why."""

    verdict: str
    reason: str


AUDIT = "audit"
"""The family of the audit's watchers, which no release has to need."""

Verdicts = dict[tuple[str, str], dict[str, Cell]]
"""By the names of patch and module: release to cell."""


def write(verdicts: Verdicts, patches: Iterable[Patch], releases: list[Release]) -> str:
    """The page. Releases that follow each other share a line where verdict and reason are the same."""
    patches = tuple(patches)
    lines = [INTRODUCTION]
    lines += needs.section(_needed(verdicts), [patch for patch in patches if patch.family != AUDIT], releases)
    for patch in patches:
        sites = [site for site in patch.sites if project_of(site.module)]
        lines += ["", f"## {patch.name}", "", patch.summary + (f" <{patch.upstream}>" if patch.upstream else "")]
        for site in sites:
            project = project_of(site.module)
            told = verdicts.get((patch.name, site.module), {})
            here = [one.name for one in releases if one.project == project and one.name in told]
            lines += ["", f"At `{site.module}`:", "", f"| {project} | verdict | reason |", "| --- | --- | --- |"]
            for cell, alike in itertools.groupby(here, key=told.__getitem__):
                lines.append(
                    f"| {', '.join(alike)} | {cell.verdict} | {cell.reason.replace('|', chr(92) + '|')} |"
                )
    return "\n".join(lines) + "\n"


def _needed(verdicts: Verdicts) -> set[tuple[str, str, str]]:
    """Return project, release and patch where a site of the project needs the patch."""
    return {
        (str(project_of(module)), release, patch)
        for (patch, module), cells in verdicts.items()
        for release, cell in cells.items()
        if cell.verdict == "needed"
    }


def read(text: str) -> Verdicts:
    """Read a page that `write` has written. Raises ValueError for any other."""
    found: Verdicts = {}
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    for section in sections:
        patch, _, rest = section.partition("\n")
        for part in re.split(r"^At `", rest, flags=re.MULTILINE)[1:]:
            module, _, table = part.partition("`")
            if (patch, module) in found:
                raise ValueError(f"verdicts.md has two tables of {patch} at {module}")
            cells = found[patch, module] = {}
            rows = [line for line in table.splitlines() if line.startswith("|")][2:]
            for row in rows:
                columns = [one.strip().replace("\\|", "|") for one in re.split(r"(?<!\\)\|", row)[1:-1]]
                if len(columns) != 3:
                    raise ValueError(f"verdicts.md: expected three columns, found {row!r}")
                for name in columns[0].split(", "):
                    if name in cells:
                        raise ValueError(f"verdicts.md tells twice of {name} at {module}, in {patch}")
                    cells[name] = Cell(*columns[1:])
    return found


def problems(text: str, patches: Iterable[Patch], releases: list[Release], tox_ini: str) -> list[str]:
    """Return the faults of the page as it is, without looking at any release, in words."""
    found = []
    patches = tuple(patches)
    try:
        verdicts = read(text)
    except ValueError as error:
        return [str(error)]
    sites = [(patch.name, site.module) for patch in patches for site in patch.sites if project_of(site.module)]
    found += [f"{patch} at {module} has no table" for patch, module in sites if (patch, module) not in verdicts]
    found += [f"{patch} at {module} has a table, and is no site" for patch, module in verdicts.keys() - set(sites)]
    for patch, module in sites:
        cells = verdicts.get((patch, module), {})
        names = [one.name for one in releases if one.project == project_of(module)]
        where = f"{patch} at {module}"
        found += [f"{where}: nothing is said of {name}" for name in names if name not in cells]
        found += [f"{where}: {name} is not in releases.txt" for name in cells.keys() - set(names)]
        for name, cell in cells.items():
            if cell.verdict not in ("needed", "fixed", "absent", "unsupported"):
                found.append(f"{where} says {cell.verdict} of {name}: {cell.reason}")
    for patch in patches:
        said = {cell.verdict for key, cells in verdicts.items() if key[0] == patch.name for cell in cells.values()}
        if "needed" not in said and patch.family != AUDIT:
            found.append(f"{patch.name} has expired: no release needs it")
        if patch.upstream is not None and not re.fullmatch(
            r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull|discussions|commit)/\w+", patch.upstream
        ):
            found.append(f"{patch.name}: expected the URL of an issue or pull request, found {patch.upstream!r}")
    known = {str(one) for one in releases}
    found += [f"tox.ini installs {one}, which releases.txt lacks" for one in installed_by(tox_ini) - known]
    besides = {one for release in releases for one in release.beside}
    found += [f"releases.txt imports with {one}, and has no line for it" for one in besides - known]
    if not found and text != write(verdicts, patches, releases):
        found.append("the page is not what would be written now")
    return found


def installed_by(tox_ini: str) -> set[str]:
    """The releases of our projects that tox.ini installs from PyPI, as ``project==version``."""
    for section, project in {
        "megatron": "megatron-core",
        "bridge": "megatron-bridge",
        "nvrx": "nvidia-resiliency-ext",
    }.items():
        tox_ini = tox_ini.replace(f"{{[{section}]install}}", project)
    projects = "|".join(PACKAGES)
    return set(re.findall(rf"(?<![\w-])(?:{projects})==\d[\w.]*", tox_ini))
