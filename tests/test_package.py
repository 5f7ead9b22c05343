"""The installed package is the tested one."""

from __future__ import annotations

import ast
import os
import sys
from configparser import ConfigParser
from importlib.metadata import entry_points, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import megapatch
from megapatch._python.finding import find_module

in_tox = pytest.mark.skipif("TOX_ENV_NAME" not in os.environ, reason="needs megapatch installed, as tox does it")


@in_tox
def test_the_wheel_is_tested_and_not_the_source_tree():
    assert "site-packages" in Path(megapatch.__file__).parts
    assert version("megapatch") == megapatch.__version__
    assert (Path(megapatch.__file__).parent / "py.typed").exists()


@in_tox
def test_two_runtime_dependencies():
    needed = [Requirement(text) for text in requires("megapatch") or ()]
    assert sorted(one.name for one in needed if one.marker is None) == ["packaging", "wrapt"]


@in_tox
def test_the_environment_is_what_its_name_says():
    """Tests that find no Megatron skip themselves; here a lack of it is an error."""
    factors = os.environ["TOX_ENV_NAME"].split("-")
    pythons = [factor for factor in factors if factor.startswith("py")]  # none: the Python that runs tox
    assert pythons in ([], [f"py{sys.version_info.major}{sys.version_info.minor}"])
    if "notorch" in factors:
        assert find_module("torch") is None
    else:  # one of the Megatrons that are tested here in turn
        number = int(version("megatron-core").split(".")[1])
        assert f"mcore0{number}" in factors
        assert (find_module("megatron.training") is not None) == (number >= 17)
    for factor in factors:
        if number := factor.partition("wrapt")[2]:
            assert version("wrapt").replace(".", "").startswith(number)


@in_tox
def test_the_command_is_installed():
    (command,) = entry_points(group="console_scripts", name="megapatch")
    assert command.value == "megapatch._cli.main:main"


def test_with_a_gpu_tox_installs_neither_torch_nor_megatron():
    """It would inherit the tested torch, which may not fit the machine's driver."""
    tox = ConfigParser(interpolation=None)
    assert tox.read(Path(__file__).parent.parent / "tox.ini")
    assert tox["testenv:gpu"]["deps"] == ""


def test_no_function_of_the_standard_library_is_replaced():
    """Not even for a moment: whoever debugs a process that imports megapatch finds Python as it is."""
    replaced = []
    for path in Path(megapatch.__file__).parent.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        imported = {
            (alias.asname or alias.name).partition(".")[0]
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0)
            for alias in node.names
            if (getattr(node, "module", None) or alias.name).partition(".")[0] in sys.stdlib_module_names
        }
        for node in nodes:
            changed = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
            setter = isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr")
            owner = ast.unparse(node if changed else node.args[0] if setter else ast.Constant(""))
            if (changed or setter) and owner.partition(".")[0] in imported and "[" not in owner:
                replaced.append(f"{path.name}: {owner}")
    assert set(replaced) <= {"_training_loop.py: sys.argv"}
