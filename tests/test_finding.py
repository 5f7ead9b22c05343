"""A module is found as an import would find it, and nothing is imported for that."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec

import pytest

from megapatch._python.finding import find_module


class Finder:
    """As that of an editable install, which knows modules by their whole names."""

    def __init__(self, *names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, None, is_package=True) if name in self.names else None


class Raises(Finder):
    def find_spec(self, name, path=None, target=None):
        raise ValueError("asked out of turn")


class Imports(Finder):
    """As wrapt's."""

    def find_spec(self, name, path=None, target=None):
        pytest.fail("it was asked")


Imports.__module__ = "wrapt.importer"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("sought", True),
        ("sought.inner", True),
        ("sought.inner.leaf", True),
        ("sought.folder.leaf", True),  # without __init__.py
        ("sought.missing", False),
        ("missing.inner", False),
        ("sought_plain.sought", False),  # below a module that is no package
        ("sought_elsewhere.inner", True),
        ("sought_elsewhere.sought", False),
    ],
)
def test_a_module_is_found_and_nothing_is_imported(tmp_path, monkeypatch, name, found):
    for file in (
        "sought/__init__.py",
        "sought/inner/__init__.py",
        "sought/inner/leaf.py",
        "sought/folder/leaf.py",
    ):
        (tmp_path / file).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / file).write_text("raise AssertionError")
    (tmp_path / "sought_plain.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    finders = object(), Raises(), Imports(), Finder("sought_elsewhere", "sought_elsewhere.inner")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, *finders])
    assert (find_module(name) is not None) == found
    assert not {module for module in sys.modules if module.startswith("sought")}
