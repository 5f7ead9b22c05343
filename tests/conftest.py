"""What tests of the engine share: modules to patch, made for one test."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path

import pytest

from megapatch._versions import here

_numbers = itertools.count()


def pytest_report_header():
    return "with " + ", ".join(f"{name} {version}" for name, version in here().items())


class Modules:
    """Writes importable modules whose names are used once: import hooks cannot be taken back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: list[str] = []

    def write(self, source: str, stem: str = "target") -> str:
        name = f"{stem}_{next(_numbers)}"
        (self.folder / f"{name}.py").write_text(source)
        self.names.append(name)
        importlib.invalidate_caches()
        return name


@pytest.fixture
def modules(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a rewritten module must be read again
    made = Modules(tmp_path)
    yield made
    for name in made.names:
        sys.modules.pop(name, None)


@pytest.fixture
def fake_megatron(tmp_path):
    """Writes a stand-in for Megatron's DDP module, where only the engine or the command line is under test."""
    folder = tmp_path / "megatron" / "core" / "distributed"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()

    def write(source):
        (folder / "distributed_data_parallel.py").write_text(source)
        return tmp_path

    return write
