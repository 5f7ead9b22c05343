"""Has a release looked at in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .table import Cell

TESTS = Path(__file__).parent.parent
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
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEGAPATCH_")}
    folders = [str(one) for one in (*((folder,) if folder else ()), *beside, TESTS)]
    environment["PYTHONPATH"] = os.pathsep.join([*folders, environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment["PYTHONWARNINGS"] = "ignore"
    if folder and project in _FOLDER_IN:
        environment[_FOLDER_IN[project]] = str(folder)
    looked = subprocess.run(
        [sys.executable, "-m", "verdicts.look", project],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if looked.returncode:
        raise CouldNotLook(f"{project} in {folder or 'this environment'}: {looked.stderr.strip()[-2000:]}")
    told = json.loads(looked.stdout)
    if told["errors"]:
        raise CouldNotLook(f"{project} in {folder or 'this environment'}: {'; '.join(told['errors'])}")
    return {(patch, module): Cell(verdict, reason) for patch, module, verdict, reason in told["cells"]}
