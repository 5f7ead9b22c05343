"""In a copy of the tree: a new patch takes the three files of docs/writing-a-patch.md; one can be removed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rigs.where import needs_megatron

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/writing-a-patch.md"
CHECKS = "megapatch/_verify/checks/training.py"
TESTS = (
    "patches/megatron/test_divide_by_zero.py",
    "patches/megatron/test_edits.py",
    "test_arrows.py",
    "test_catalog.py",
    "test_pages.py",
    "test_quick.py",
    "test_verdicts.py",
    "verify/test_command.py",
)
NAMES = "megatron.divide-by-zero or arrows or catalog or generated or quick or file_is_whole or every_patch"


@pytest.fixture
def tree(tmp_path):
    return shutil.copytree(ROOT, tmp_path / "tree", ignore=shutil.ignore_patterns(".*", "__pycache__"))


def run(tree, *command):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, *command],
        cwd=tree / "tests",
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def run_well(tree, *command):
    shown = run(tree, *command)
    assert shown.returncode == 0, shown.stdout[-8000:]
    return shown.stdout


@needs_megatron
@pytest.mark.nightly
def test_the_three_files_are_enough(tree):
    files = dict(re.findall(r"^<!-- (\S+) -->\n```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    scenario, row = map(files.pop, ("scenario", "row"))
    checks = (tree / CHECKS).read_text()
    files[CHECKS] = checks.replace("CHECKS = (\n", f"{scenario}\n\nCHECKS = (\n    {row.rstrip()},\n")
    assert len(files) == 3
    for name, text in files.items():
        (tree / name).write_text(text)
    early = run(tree, "-m", "pytest", "-c", str(tree / "tox.ini"), "-q", TESTS[0])
    assert "run `cd tests && python -m pages`" in early.stdout
    assert "wrote megapatch/patches/_catalogue.py\n" in run_well(tree, "-m", "pages")
    assert "passed" in run_well(tree, "-m", "pytest", "-c", str(tree / "tox.ini"), "-q", "-k", NAMES, *TESTS)


REMOVED = """\
import megapatch
from megapatch._engine.complaints import complaints
from megapatch._engine.settings import Settings
from megapatch.patches import PATCHES, _catalogue

assert "areal.eval-loss" not in [patch.name for patch in PATCHES]
_catalogue.RETIRED["areal.eval-loss"] = "AReaL 9.9"
assert complaints(Settings(disable=("areal.eval-loss",)), []) == []
"""


def test_a_patch_can_be_removed(tree):
    (tree / "megapatch/patches/areal/eval_loss.py").unlink()
    written = run_well(tree, "-m", "pages")
    assert "wrote megapatch/patches/_catalogue.py\n" in written
    assert "wrote docs/patches.md\n" in written
    assert "wrote docs/verdicts.csv\n" in written
    run_well(tree, "-c", REMOVED)
