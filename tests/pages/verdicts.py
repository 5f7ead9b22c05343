"""The site's page of verdicts: docs/verdicts.csv by release, with the patches that each needs, and by patch."""

from __future__ import annotations

import itertools
import re

from verdicts import releases, table

from megapatch import patches
from megapatch.patch import Patch

INTRODUCTION = """\
# What each patch says of each release

[Your release](#your-release) has the patches that it needs in one row; below it, each patch has its verdicts.

`tox -e verdicts` loads each release's own code, in a process of its own, asks every diagnosis, and writes
`docs/verdicts.csv`. This page is made of it. CI asks the diagnoses of the releases that it installs, and fails
where they differ. No version number is looked at. Tags and commits are checkouts.

The verdicts are explained in [Writing a patch](writing-a-patch.md#the-diagnosis). Some checkouts were not
looked at yet; there `megapatch doctor` says it.

## Your release

Each release has an anchor, such as `#verl-0.9.1`. A row names the patches of the release's own code; those of the
Megatron that you run it with come on top. "Loaded with" is the Megatron next to which its code was looked at.
Patches in the last column are needed as much, and leave the numbers of a run that did not crash as they are."""
HEAD = "| release | loaded with | may change numbers | other patches |\n| --- | --- | --- | --- |"


def rows() -> str:
    """Return docs/verdicts.csv without the rows of sites that are gone."""
    return table.write(
        table.read(table.FILE.read_text()), patches.PATCHES, releases.read(releases.FILE.read_text())
    )


def page() -> str:
    """Return the whole page."""
    verdicts = table.read(table.FILE.read_text())
    lines = [INTRODUCTION]
    for project, its in itertools.groupby(releases.read(releases.FILE.read_text()), lambda one: one.project):
        lines += ["", f"### {project}", "", HEAD, *(_row(release, verdicts) for release in its)]
    for patch in patches.PATCHES:
        lines += ["", f"## {patch.name}", "", patch.summary + (f" <{patch.upstream}>" if patch.upstream else "")]
        for site in patch.sites:
            lines += _site(site.module, verdicts.get((patch.name, site.module), {}))
    return "\n".join(lines) + "\n"


def _row(release: releases.Release, verdicts: table.Verdicts) -> str:
    needed = {
        patch
        for (patch, module), cells in verdicts.items()
        if releases.project_of(module) == release.project
        and release.name in cells
        and cells[release.name].verdict == "needed"
    }
    needs = [patch for patch in patches.PATCHES if patch.name in needed]
    cells = [
        f'<a id="{anchor(str(release))}"></a>{release.name}',
        ", ".join(f"[{one.replace('==', ' ')}](#{anchor(one)})" for one in release.beside),
        *(", ".join(_link(patch) for patch in needs if patch.changes_numbers is kind) for kind in (True, False)),
    ]
    return f"| {' | '.join(cell or 'none' for cell in cells)} |"


def _site(module: str, cells: dict[str, table.Cell]) -> list[str]:
    project = releases.project_of(module)
    lines = ["", f"At `{module}`:", "", f"| {project} | verdict | reason |", "| --- | --- | --- |"]
    for cell, alike in itertools.groupby(cells or ["all"], lambda name: cells.get(name, table.NOT_LOOKED_AT)):
        reason = cell.reason.replace("|", "\\|")
        lines.append(f"| {', '.join(alike)} | {cell.verdict} | {reason} |")
    return lines


def anchor(release: str) -> str:
    """Return the anchor of a release's row; `release` is ``project==name``."""
    return release.replace("==", "-")


def _link(patch: Patch) -> str:
    """Link to the patch's own section, whose anchor is its heading as the site makes it."""
    return f"[`{patch.name}`](#{re.sub(r'[^a-z0-9_-]', '', patch.name)})"
