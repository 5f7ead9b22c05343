"""Which tests run where: without torch and Megatron, where one is required, in CI, and in tox -e quick."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from rigs.where import (
    EACH,
    HOW_TO_GET,
    MEGATRON,
    NEWEST,
    OLDER,
    ON_THE_READMES,
    OTHER_PYTHONS,
    QUICK_BY_TURNS,
    QUICK_WITH_EACH,
    README,
    SHARES,
    TESTS,
    TORCH,
    missing,
    reason_to_skip,
    runs_in_ci,
    runs_without_megatron,
    uses_torch,
)

from megapatch.patches import PATCHES

NO_MEGATRON = {MEGATRON: HOW_TO_GET[MEGATRON]}

# A plugin for pytest: as if these were not installed.
HIDE = """
from megapatch._python import finding
found = finding.find_module
finding.find_module = lambda name: None if name.partition(".")[0] in {hidden} else found(name)
"""


@pytest.mark.parametrize(
    ("file", "without_megatron", "without_either"),
    [
        ("test_cli.py", None, None),
        ("patches/verl/test_diagnosis.py", None, None),
        ("train_step/test_metrics.py", None, None),
        ("test_agreement.py", None, None),  # marks its tests
        ("streaming/test_ray_trainer.py", None, None),  # marks its tests
        ("testing/test_ranks.py", None, TORCH),
        ("gpu/conftest.py", None, TORCH),
        ("patches/megatron/conftest.py", None, TORCH),
        ("patches/megatron/test_diagnoses.py", None, TORCH),  # marks its tests
        ("streaming/test_slime.py", MEGATRON, TORCH),  # by megapatch.testing
        ("train_step/test_last_call.py", MEGATRON, TORCH),  # by a rig
        ("patches/megatron/test_nested_no_sync.py", MEGATRON, TORCH),
    ],
)
def test_a_module_is_skipped_for_what_it_and_its_rigs_import(file, without_megatron, without_either):
    assert reason_to_skip(TESTS / file, NO_MEGATRON) == HOW_TO_GET.get(without_megatron)
    assert reason_to_skip(TESTS / file, HOW_TO_GET) == HOW_TO_GET.get(without_either)


@pytest.mark.parametrize(
    ("file", "uses"),
    [
        ("test_engine.py", False),
        ("doctor/test_doctor.py", False),  # imports Megatron in processes of its own
        ("test_demo.py", True),  # in a function
        ("train_step/test_last_call.py", True),  # in a rig
        ("patches/megatron/test_edits.py", True),  # by its conftest.py
    ],
)
def test_which_modules_are_run_without_torch(file, uses):
    """`--torch` divides the tests by it: where torch is imported the engine's take several times as long."""
    assert uses_torch(TESTS / file) == uses


def test_a_megatron_that_cannot_be_imported_is_not_missing(fake_megatron, monkeypatch):
    monkeypatch.syspath_prepend(str(fake_megatron("raise ImportError('broken')")))
    assert MEGATRON not in missing()


def collect(folder, hidden, *files, **environment):
    (folder / "hide.py").write_text(HIDE.format(hidden=hidden))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    options = ["-c", "../tox.ini", "-p", "hide", "-p", "no:cacheprovider", "-rs", "--collect-only", "-q"]
    shown = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": path, "MEGATRON_REQUIRED": "", "COLUMNS": "500", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return shown.returncode, shown.stdout + shown.stderr


def test_a_skip_says_what_is_missing_and_how_to_get_it(tmp_path):
    files = ["streaming/test_slime.py", "test_settings.py"]
    status, said = collect(tmp_path, ["torch", "megatron"], *files)
    assert status == 0 and "test_settings.py::" in said
    assert HOW_TO_GET[TORCH] in said


def test_where_megatron_is_required_its_lack_is_an_error(tmp_path):
    status, said = collect(tmp_path, ["megatron"], "test_settings.py", MEGATRON_REQUIRED="1")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "MEGATRON_REQUIRED is set" in said and HOW_TO_GET[MEGATRON] in said


def test_each_of_megatrons_patches_has_quick_tests():
    named = {patch.name.partition(".")[2].replace("-", "_") for patch in PATCHES if patch.family == "megatron"}
    files = TESTS.glob("patches/megatron/test_*.py")
    assert named <= {
        file.stem.removeprefix("test_") for file in files if "\n@pytest.mark.quick\ndef test_" in file.read_text()
    }


@pytest.mark.parametrize(
    ("file", "minors"),
    [
        ("test_rerun_state_dict.py", {"0.14", "0.15", "0.16", "0.17"}),
        ("test_rerun_transient_fault.py", {"0.12", "0.13", "0.14", "0.15", "0.16", "0.17"}),
    ],
)
def test_a_patch_that_the_newest_megatron_does_not_need_runs_with_one_that_does(file, minors):
    quick = {minor for minor in OLDER if runs_in_ci(f"patches/megatron/{file}", f"{minor}.2")}
    assert len(quick & minors) == 1


def test_each_line_of_the_shares_is_of_some_module():
    modules = [file.relative_to(TESTS).as_posix() for file in TESTS.glob("**/test_*.py")]
    assert [line for line in SHARES if not any(module.startswith(line) for module in modules)] == []


def test_each_module_that_needs_megatron_runs_with_the_newest_and_one_other():
    files = [*TESTS.glob("patches/**/test_*.py"), *TESTS.glob("train_step/test_*.py")]
    pythons = {minor: README if minor in OLDER else (3, 12) for minor in EACH}
    for file in files:
        module = file.relative_to(TESTS).as_posix()
        share = {minor for minor in EACH if runs_in_ci(module, f"{minor}.2", pythons[minor], quick=False)}
        if not runs_without_megatron(file):
            assert NEWEST in share
            assert len(share) == (1 if module.startswith(tuple(SHARES)) else 2) or share == {*EACH}
            quick = {minor for minor in EACH if runs_in_ci(module, f"{minor}.2", pythons[minor])}
            assert quick == share or (len(quick) == 2 and module.startswith(QUICK_BY_TURNS)) or quick == {*EACH}
    assert all(runs_in_ci(QUICK_WITH_EACH, f"{minor}.2") for minor in EACH)


def test_a_module_of_the_engine_runs_with_the_readmes_python_and_with_one_other():
    modules = [file.name for file in TESTS.glob("test_*.py") if SHARES.get(file.name) != EACH]
    for module in modules:
        assert runs_in_ci(module, "", README)
        assert sum(runs_in_ci(module, "", python) for python in OTHER_PYTHONS) == 1
        if runs_without_megatron(TESTS / module):
            assert not any(runs_in_ci(module, f"{minor}.2") for minor in EACH)
    tox = (TESTS.parent / "tox.ini").read_text()
    assert all(f" {line.removesuffix('/')}" in tox for line, share in SHARES.items() if share == ON_THE_READMES)
