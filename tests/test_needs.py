"""Tests are skipped without torch and without Megatron, and fail where one of them is required."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rigs.needs import HOW_TO_GET, MEGATRON, TORCH, missing, reason_to_skip, uses_torch

HERE = Path(__file__).parent
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
    assert reason_to_skip(HERE / file, NO_MEGATRON) == HOW_TO_GET.get(without_megatron)
    assert reason_to_skip(HERE / file, HOW_TO_GET) == HOW_TO_GET.get(without_either)


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
    assert uses_torch(HERE / file) == uses


def test_a_megatron_that_cannot_be_imported_is_not_missing(fake_megatron, monkeypatch):
    monkeypatch.syspath_prepend(str(fake_megatron("raise ImportError('broken')")))
    assert MEGATRON not in missing()


def collect(folder, hidden, *files, **environment):
    (folder / "hide.py").write_text(HIDE.format(hidden=hidden))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    options = ["-c", "../tox.ini", "-p", "hide", "-p", "no:cacheprovider", "-rs", "--collect-only", "-q"]
    shown = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=HERE,
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
