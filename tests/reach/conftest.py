"""The projects and environments that are tested."""

from __future__ import annotations

import shutil
import venv
from pathlib import Path

import pytest
from rigs.run import CHILDREN, GREETER, PATCH, PROGRAM

import megapatch


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with two targets, patched by a third party; in a folder with a space."""
    folder = tmp_path_factory.mktemp("a") / "a project"
    info = folder / "acme-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[megapatch.patches]\ngreeter = acme:ONE\ngreeter2 = acme:TWO\n")
    files = {"acme": PATCH, "greeter": GREETER, "greeter2": GREETER, "program": PROGRAM, "children": CHILDREN}
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """The folder of a copy of megapatch, with a space in its name."""
    folder = tmp_path_factory.mktemp("b") / "a copy"
    source = Path(megapatch.__file__).parent
    shutil.copytree(source, folder / "megapatch", ignore=shutil.ignore_patterns("__pycache__", "testing"))
    return folder


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """The Python of an environment in which nothing is installed."""
    folder = tmp_path_factory.mktemp("c")
    venv.create(folder, symlinks=True)
    return str(folder / "bin" / "python")
