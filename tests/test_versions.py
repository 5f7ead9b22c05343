"""Looking for modules and versions without importing anything."""

from __future__ import annotations

import importlib
import sys

import pytest

from megapatch import versions


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A namespace package with a package whose import fails, as megatron.training's does without a GPU."""
    package = tmp_path / "megapatch_test_namespace" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "module.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("megapatch_test_namespace", True),
        ("megapatch_test_namespace.package.module", True),
        ("megapatch_test_namespace.package.other", False),
        ("megapatch_test_namespace.package.module.inner", False),
        ("megapatch_test_other.package", False),
    ],
)
def test_a_module_is_found_without_importing_it(tree, name, found):
    assert (versions.find_module(name) is not None) == found
    assert not [name for name in sys.modules if name.startswith("megapatch_test_namespace")]


def test_versions_are_those_of_what_is_installed():
    assert versions.installed("pytest", "no-such-distribution") == {"pytest": pytest.__version__}
