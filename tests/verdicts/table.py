"""docs/verdicts.csv, written and read: the only place where verdicts are kept.

A row is a site and what follows each other of a project's releases with one verdict and reason. The site's page is
made of it (tests/pages/verdicts.py).
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from megapatch.patch import Patch, Status, VerdictKind

from .releases import PACKAGES, Release, project_of

FILE = Path(__file__).parent.parent.parent / "docs/verdicts.csv"
HEAD = ["patch", "module", "project", "releases", "verdict", "reason"]


class Cell(NamedTuple):
    """A diagnosis's verdict on one release, and why."""

    verdict: str
    reason: str


KNOWN = [kind.value for kind in VerdictKind if not kind.status.needs_attention]
_NEEDS_IT = {kind.value for kind in VerdictKind if kind.status is Status.APPLIED}

NOT_LOOKED_AT = Cell("not looked at", "")
"""Of a checkout that was not there when `tox -e verdicts` ran. A site without any row is new."""

Verdicts = dict[tuple[str, str], dict[str, Cell]]
"""By the names of patch and module: release to cell."""


def write(verdicts: Verdicts, patches: Iterable[Patch], releases: list[Release]) -> str:
    """Return the file's text."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(HEAD)
    for patch, module in _sites(patches):
        cells = _with_checkouts(verdicts.get((patch, module), {}), module, releases)
        for cell, alike in itertools.groupby(cells, key=cells.__getitem__):
            rows.writerow([patch, module, project_of(module), ", ".join(alike), *cell])
    return text.getvalue()


def read(text: str) -> Verdicts:
    """Read what `write` has written. Raises ValueError for anything else."""
    found: Verdicts = {}
    head, *rows = csv.reader(io.StringIO(text))
    for row in rows:
        if head != HEAD or len(row) != len(HEAD):
            raise ValueError(f"verdicts.csv: expected the columns {', '.join(HEAD)}; found {row}")
        patch, module, _, releases, verdict, reason = row
        cells = found.setdefault((patch, module), {})
        for name in releases.split(", "):
            if name in cells:
                raise ValueError(f"verdicts.csv has two verdicts of {patch} at {module} on {name}")
            cells[name] = Cell(verdict, reason)
    return found


def problems(text: str, patches: Iterable[Patch], releases: list[Release], tox_ini: str) -> list[str]:
    """Return the faults of the file as it is, without looking at any release, in words."""
    patches = tuple(patches)
    try:
        verdicts = read(text)
    except ValueError as error:
        return [str(error)]
    sites = set(_sites(patches))
    found = [f"{patch} at {module} has verdicts, and is not a site" for patch, module in verdicts.keys() - sites]
    for patch, module in verdicts.keys() & sites:
        cells = verdicts[patch, module]
        names = {one.name: one.is_wheel for one in releases if one.project == project_of(module)}
        where = f"{patch} at {module}"
        found += [f"{where}: no verdict on {name}" for name in names if name not in cells]
        found += [f"{where}: {name} is not in releases.txt" for name in cells.keys() - names]
        for name, cell in cells.items():
            if cell.verdict not in KNOWN and (cell != NOT_LOOKED_AT or names.get(name)):
                found.append(f"{where} says {cell.verdict} of {name}: {cell.reason}")
    for patch in patches:
        said = {cell.verdict for key, cells in verdicts.items() if key[0] == patch.name for cell in cells.values()}
        if said and not said & {*_NEEDS_IT, NOT_LOOKED_AT.verdict}:
            found.append(f"{patch.name} has expired: no release needs it")
        if patch.upstream is not None and not re.fullmatch(
            r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull|discussions|commit)/\w+", patch.upstream
        ):
            found.append(f"{patch.name}: expected the URL of an issue or pull request, found {patch.upstream!r}")
    known_releases = {str(one) for one in releases}
    found += [
        f"tox.ini installs {one}, which releases.txt lacks" for one in installed_by(tox_ini) - known_releases
    ]
    imported_with = {one for release in releases for one in release.beside}
    found += [f"releases.txt imports with {one}, and has no line for it" for one in imported_with - known_releases]
    if not found and text != write(verdicts, patches, releases):
        found.append("verdicts.csv is not what would be written now")
    return found


def _sites(patches: Iterable[Patch]) -> list[tuple[str, str]]:
    return [(patch.name, site.module) for patch in patches for site in patch.sites if project_of(site.module)]


def _with_checkouts(cells: dict[str, Cell], module: str, releases: list[Release]) -> dict[str, Cell]:
    """Return the cells in the order of the releases, and of a site that was looked at one for each checkout."""
    here = [one for one in releases if one.project == project_of(module)] if cells else []
    return {one.name: cells.get(one.name, NOT_LOOKED_AT) for one in here if one.name in cells or not one.is_wheel}


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
