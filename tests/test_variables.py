"""The environment variables in conftest.py's table: all that tests read, and an error where one is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def conftest():
    spec = spec_from_file_location("conftest_of_all", TESTS / "conftest.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CONFTEST = conftest()
VARIABLES = CONFTEST.VARIABLES


def collected(**variables):
    known = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-m", "pytest", "-c", TESTS.parent / "tox.ini", "--co", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, "test_where.py"],
        cwd=TESTS,
        env={**known, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_variable_that_names_a_folder_is_in_the_table():
    named = re.compile(r"\b[A-Z][A-Z_]*_(?:CHECKOUT|RELEASES)\b")
    files = [*TESTS.rglob("*.py"), TESTS.parent / "tox.ini"]
    assert {name for file in files for name in named.findall(file.read_text())} == set(VARIABLES)


def test_what_is_set_is_shown(tmp_path):
    (tmp_path / "slime/backends/megatron_utils").mkdir(parents=True)
    shown = collected(SLIME_CHECKOUT=str(tmp_path))
    assert shown.returncode == 0, shown.stderr
    assert f"SLIME_CHECKOUT={tmp_path}: {VARIABLES['SLIME_CHECKOUT'].runs}" in shown.stdout
    assert "NEMO_RL_CHECKOUT" not in shown.stdout


@pytest.mark.parametrize("name", VARIABLES)
def test_a_wrong_folder_is_told_from_a_right_one(name, tmp_path):
    variable = VARIABLES[name]
    assert CONFTEST.wrong_with(tmp_path, variable).endswith("in it, but nothing")
    (tmp_path / "something_else").mkdir()
    assert CONFTEST.wrong_with(tmp_path, variable).endswith("in it, but something_else")
    (tmp_path / variable.has[0].replace("*", "any")).mkdir(parents=True)
    assert CONFTEST.wrong_with(tmp_path, variable) is None


def test_a_wrong_folder_is_an_error(tmp_path):
    (tmp_path / "something_else").mkdir()
    shown = collected(SKYRL_CHECKOUT=str(tmp_path))
    assert shown.returncode == pytest.ExitCode.USAGE_ERROR
    said = f"ERROR: SKYRL_CHECKOUT={tmp_path}: expected a checkout of SkyRL; found none of skyrl_train, "
    assert said in shown.stderr


def test_so_is_one_that_is_missing_and_a_megatron_that_is_not_on_the_path(tmp_path):
    missing = collected(NEMO_RL_CHECKOUT=str(tmp_path / "missing"))
    assert missing.returncode == pytest.ExitCode.USAGE_ERROR
    assert "expected a checkout of NeMo-RL; found no folder there" in missing.stderr
    (tmp_path / "megatron/core").mkdir(parents=True)
    beside = collected(MEGATRON_CHECKOUT=str(tmp_path))
    assert beside.returncode == pytest.ExitCode.USAGE_ERROR
    assert "expected it on PYTHONPATH" in beside.stderr
