"""The part of docs/verdicts.md that readers look up: a row for each release, with the patches that it needs."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from megapatch.patch import Patch

from .releases import PACKAGES, Release

INTRODUCTION = """\
## Your release

Each release has an anchor, such as `verdicts.md#verl-0.9.1`. A row names the patches of the release's own code;
those of the Megatron that you run it with come on top. "Loaded with" is the Megatron next to which its code was
looked at. Patches in the last column are needed as much, and leave the numbers of a run that did not crash as
they are."""
HEAD = "| release | loaded with | may change numbers | other patches |\n| --- | --- | --- | --- |"


def section(
    needed: Collection[tuple[str, str, str]], patches: Sequence[Patch], releases: list[Release]
) -> list[str]:
    """Return the lines of this part.

    Args:
        needed: project, release and patch, wherever a release needs one.
    """
    lines = [INTRODUCTION]
    for project in PACKAGES:
        rows = [
            _row(one, [patch for patch in patches if (project, one.name, patch.name) in needed])
            for one in releases
            if one.project == project
        ]
        lines += ["", f"### {project}", "", HEAD, *rows]
    return lines


def anchor(release: str) -> str:
    """Return the anchor of a release's row; `release` is ``project==name``."""
    return release.replace("==", "-")


def _row(release: Release, needs: list[Patch]) -> str:
    beside = ", ".join(f"[{one.replace('==', ' ')}](#{anchor(one)})" for one in release.beside)
    cells = [
        f'<a id="{anchor(str(release))}"></a>{release.name}',
        beside,
        *(", ".join(_link(patch) for patch in needs if patch.changes_numbers is kind) for kind in (True, False)),
    ]
    return f"| {' | '.join(cell or 'none' for cell in cells)} |"


def _link(patch: Patch) -> str:
    """Link to the patch's own section, whose anchor is its heading as both GitHub and the site make it."""
    return f"[`{patch.name}`](#{re.sub(r'[^a-z0-9_-]', '', patch.name)})"
