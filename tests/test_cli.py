"""The command line in processes of its own: output, errors, exit codes."""

from __future__ import annotations

import pytest
from rigs.command import run

from megapatch.patches import PATCHES


def test_importing_megapatch_imports_neither_torch_nor_megatron():
    script = "import sys, megapatch; print([m for m in sys.modules if m.split('.')[0] in ('torch', 'megatron')])"
    assert run("-c", script).stdout == "[]\n"


def test_what_needs_a_model_is_loaded_with_the_first_one():
    script = (
        "import wrapt, sys; before = set(sys.modules); import megapatch; print(*sorted({*sys.modules} - before))"
    )
    loaded = run("-c", script).stdout.split()
    assert "megapatch.patches.nemo_rl.split_train_step" in loaded
    late = (
        "megapatch.train_step",
        "megapatch.patches.nemo_rl._split_step.worker",
        "dataclasses",
    )  # each costs 1 ms or more
    assert not set(late) & set(loaded)


def test_activate_takes_and_ignores_arguments():
    assert run("-c", "import megapatch; megapatch.activate(1, model=None)").returncode == 0


@pytest.mark.parametrize("command", ["", "doctor", "list", "explain", "demo"])
def test_help(command):
    shown = run(*command.split(), "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "usage: megapatch" in shown.stdout


def test_bad_usage_exits_with_2():
    for arguments in (["docter"], ["doctor", "--jsn"], ["explain"], []):
        shown = run(*arguments)
        assert shown.returncode == 2
        assert "usage: megapatch" in shown.stderr


def test_list_names_every_patch():
    shown = run("list")
    assert shown.returncode == 0
    assert [line.split()[0] for line in shown.stdout.splitlines()] == [patch.name for patch in PATCHES]


def test_explain_tells_all_about_a_patch():
    shown = run("explain", "megatron.train-reentry")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(
        "megatron.train-reentry: megatron.training.training.train() can be called again"
    )
    for told in (
        "\nSymptom   a second train() dies",
        "\nUpstream  unfixed in",
        "\nSeam      the module function",
        "\nLimits    needs megatron.forward-pre-hook",
        "\nCost      once a call",
        "\nLink      https://github.com/THUDM/slime/issues/1779",
        "\nNumbers   not changed",
        "\nSite      megatron.training.training: train",
    ):
        assert told in shown.stdout


def test_explain_takes_globs():
    shown = run("explain", "*.nested-*", "megatron.rerun-state-dict", "nemo_rl.split-train-step")
    assert shown.returncode == 0
    assert shown.stdout.count("\nSymptom ") == 3
    assert shown.stdout.count("\nSite ") == 5
    # known there, and left alone: no targets
    assert "\nSite      nemo_rl.models.policy.megatron_policy_worker\n" in shown.stdout


def test_explain_of_an_unknown_name_tells_what_is_near():
    shown = run("explain", "megatron.train-rentry")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.startswith(
        "no patch is called 'megatron.train-rentry'; did you mean megatron.train-reentry"
    )


def test_an_old_python_is_told_in_one_sentence():
    script = "import sys; sys.version_info = (3, 9, 1); sys.version = '3.9.1 (old)'; import megapatch"
    shown = run("-c", script)
    assert shown.returncode == 1
    assert shown.stderr.splitlines()[-1] == "ImportError: megapatch needs Python 3.10 or later; this is 3.9.1"
