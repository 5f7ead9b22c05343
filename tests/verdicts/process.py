"""Has a release looked at in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megapatch.testing import RanksFailed, run_ranks

from .look import cells_and_errors
from .table import Cell

_FOLDER_IN = {
    "slime": "SLIME_CHECKOUT",
    "miles": "SLIME_CHECKOUT",
    "nemo-rl": "NEMO_RL_CHECKOUT",
    "skyrl": "SKYRL_RELEASE",
    "skyrl-train": "SKYRL_RELEASE",
    "verl": "VERL_RELEASE",
    "ms-swift": "SWIFT_RELEASE",
    "areal": "AREAL_RELEASE",
    "roll": "ROLL_FOLDER",
}


class CouldNotLook(Exception):
    """Something of the release could not be told; the text says what."""


def verdicts_on(
    project: str, folder: str | Path | None = None, beside: Sequence[str | Path] = ()
) -> dict[tuple[str, str], Cell]:
    """By the names of patch and module, the cells of the project in that folder, or of the one installed here.

    beside: folders of other projects that it is imported with.

    Raises CouldNotLook when a module cannot be imported, or a diagnosis fails.
    """
    environment = {name: "" for name in os.environ if name.startswith("MEGAPATCH_")}
    if folder and project in _FOLDER_IN:
        environment[_FOLDER_IN[project]] = str(folder)
    folders = [str(one) for one in (*((folder,) if folder else ()), *beside)]
    where = f"{project} in {folder or 'this environment'}"
    try:
        ((cells, errors),) = run_ranks(cells_and_errors, 1, project, folders, env=environment, timeout=300)
    except RanksFailed as failed:
        raise CouldNotLook(f"{where}: {str(failed)[-2000:]}") from None
    if errors:
        raise CouldNotLook(f"{where}: {'; '.join(errors)}")
    return {(patch, module): Cell(verdict, reason) for patch, module, verdict, reason in cells}
