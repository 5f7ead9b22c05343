"""The three files of docs/writing-a-patch.md, added to a copy of the tree, are all that a new patch takes."""

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
NAMES = "divide or arrows or catalog or generated or quick or file_is_whole or every_patch or another_body"


@needs_megatron
@pytest.mark.nightly
def test_the_three_files_are_enough(tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    files = dict(re.findall(r"^<!-- (\S+) -->\n```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    scenario, row = map(files.pop, ("scenario", "row"))
    checks = (tree / CHECKS).read_text()
    files[CHECKS] = checks.replace("CHECKS = (\n", f"{scenario}\n\nCHECKS = (\n    {row.rstrip()},\n")
    assert len(files) == 3
    for name, text in files.items():
        (tree / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}

    def run(*command):
        command = [sys.executable, "-m", *command]
        shown = subprocess.run(
            command, cwd=tree / "tests", env=environment, capture_output=True, text=True, check=False
        )
        assert shown.returncode == 0, shown.stdout[-4000:] + shown.stderr[-4000:]
        return shown.stdout

    assert "wrote megapatch/patches/_catalogue.py\n" in run("pages")
    assert "passed" in run("pytest", "-c", str(tree / "tox.ini"), "-q", "-k", NAMES, *TESTS)
