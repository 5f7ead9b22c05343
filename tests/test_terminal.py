"""The command line on a terminal, and what pages and examples promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from rigs.command import run, terminal

from megapatch.patches import PATCHES

PAGES = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("columns", [70, 100, 120])
def test_lists_and_explanations_are_as_wide_as_the_terminal(columns):
    known = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    with terminal(columns) as (output, written):
        for command in (["list"], ["explain", "*"]):
            subprocess.run([sys.executable, "-m", "megapatch", *command], stdout=output, env=known, check=True)
    lines = written.decode().splitlines()
    assert max(len(line) for line in lines if len(line.split()) > 2) <= columns  # a heading, a long name
    assert not [line for line in lines if line.startswith(" ") and not line.startswith("  ")]
    words = " ".join(" ".join(lines).split())
    for patch in PATCHES:
        assert words.count(" ".join(patch.summary.split())) >= 2
        assert " ".join(patch.doc.split("Cost ")[-1].split()) in words


def test_elsewhere_a_patch_is_a_line():
    assert len(run("list", COLUMNS="60").stdout.splitlines()) == len(PATCHES)


def test_a_pth_file_does_nothing_once_megapatch_is_gone(tmp_path):
    """The lines of docs/reach.md, run as they are."""
    text = (PAGES / "reach.md").read_text()
    lines = text.partition("## A .pth file")[2].partition("```sh\n")[2].partition("```")[0]
    venv.create(tmp_path / "env", symlinks=True)
    folder = str(tmp_path / "env" / "bin")
    known = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env = {**known, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", lines], env=env, check=True)
    (tmp_path / "megapatch.py").write_text("print('imported')")
    for path, expected in ((tmp_path, "imported\n"), ("", "")):
        done = subprocess.run(
            [f"{folder}/python", "-c", "pass"],
            env=env | {"PYTHONPATH": str(path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert (done.stdout, done.stderr) == (expected, "")


def test_every_example_that_looks_runnable_is_and_imports_what_is_promised():
    for path in (Path(__file__).parents[1] / "examples").glob("*.py"):
        text = path.read_text()
        runs = (f"python examples/{path.name}" in text and "__name__" in text) or "main()" in text
        assert path.name.startswith("_") or runs, path.name
        assert "megapatch._" not in text and "megapatch.testing._" not in text, path.name


def test_the_blocks_of_pages_use_no_name_before_it_is_defined():
    """A class of a block's own, used above its definition, as docs/slime.md once did."""
    for page in PAGES.glob("*.md"):
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            for name in re.findall(r"^(?:class|def) (\w+)", block, re.MULTILINE):
                defined = re.search(rf"^(?:class|def) {name}\b", block, re.MULTILINE).start()
                top = [line for line in block[:defined].splitlines() if line[:1].strip()]
                assert not [line for line in top if re.search(rf"\b{name}\(", line)], (page.name, name)
