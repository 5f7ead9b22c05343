"""megapatch verify, as a user runs it, on the megatron-core that is installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from rigs.command import heed_ctrl_c, run
from rigs.where import needs_megatron

from megapatch._verify import command
from megapatch._verify.checks import CHECKS
from megapatch._verify.world import Local
from megapatch.patches._catalogue import CATALOGUE


def checks_in(found):
    return {check["name"]: check for check in found["checks"]}


def test_every_patch_of_megatron_has_a_check():
    assert set(CATALOGUE["megatron"]) == {check.name for check in CHECKS if check.name.startswith("megatron.")}


@needs_megatron
def test_a_defect_is_seen_and_repaired_and_what_is_off_is_not_run():
    names = ("megatron.nested-no-sync", "megatron.prepare-grads-once", "slime.train-reentry")
    shown = run("verify", "--json", *names, MEGAPATCH_DISABLE="megatron.prepare-grads-once")
    assert shown.returncode == 0, shown.stderr
    checks = checks_in(json.loads(shown.stdout))
    assert {name: check["outcome"] for name, check in checks.items()} == {
        "megatron.nested-no-sync": "repaired",
        "megatron.prepare-grads-once": "disabled",
        "slime.train-reentry": "not here",
    }
    ours = checks["megatron.nested-no-sync"]
    assert (ours["seen"], ours["repaired"], ours["layouts"]) == (True, True, ["dp", "pp2", "tp2", "ep2"])
    assert 0 <= ours["difference"] <= 1e-5
    assert "[1/1] megatron.nested-no-sync: defect seen" in shown.stderr


@needs_megatron
@pytest.mark.thorough
def test_ranks_that_do_not_finish_in_time_are_ended_and_the_exit_code_is_1():
    shown = run("verify", "megatron.nested-no-sync", "--timeout", "0.05")
    assert shown.returncode == 1
    assert "not finished: the processes do not work here" in shown.stdout
    assert "did not finish within 0.05 s" in shown.stdout


@needs_megatron
@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_when_it_is_stopped_it_prints_what_it_knows(number):
    environment = {name: text for name, text in os.environ.items() if not name.startswith("MEGAPATCH_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "megapatch", "verify", "--json", "audit", "train-step", "--processes", "1"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_ctrl_c,
    )
    while "[1/2]" not in process.stderr.readline():
        pass
    process.send_signal(number)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    found = json.loads(printed)
    assert found["stopped"] == "interrupted"
    assert checks_in(found)["train-step"]["outcome"] == "right"


@needs_megatron
@pytest.mark.thorough
def test_under_torchrun_its_ranks_are_the_ranks_and_the_first_one_prints():
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # A rank that fails does not keep the others until the time limit: without its patch this one fails.
    shown = subprocess.run(
        [*launch, "-m", "megapatch", "verify", "--json", "megatron.nested-no-sync"],
        env={name: text for name, text in os.environ.items() if not name.startswith("MEGAPATCH_")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert {name: check["outcome"] for name, check in checks_in(json.loads(shown.stdout)).items()} == {
        "megatron.nested-no-sync": "repaired"
    }


def refused(script):
    shown = run("-c", script)
    assert (shown.returncode, shown.stdout) == (2, "")
    return shown.stderr


WITH = "import sys; from megapatch._verify import command, world; {}; sys.exit(command.verify({}))"


def test_without_torch_it_says_what_is_missing():
    missing = "world.find_module = lambda name: None if name == 'torch' else object()"
    assert refused(WITH.format(missing, "")) == (
        "verify needs torch, not installed here: run it with the Python that trains\n"
    )


@needs_megatron
def test_a_megatron_that_cannot_be_imported_is_not_taken_for_a_defect(tmp_path):
    (tmp_path / "megatron/core").mkdir(parents=True)
    (tmp_path / "megatron/core/__init__.py").write_text("raise RuntimeError('needs a GPU')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    shown = run("verify", PYTHONPATH=path)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.endswith(
        "verify cannot run here: megatron.core cannot be imported: RuntimeError: needs a GPU\n"
    )


def test_a_name_that_there_is_not():
    assert "did you mean megatron.nested-no-sync" in refused(WITH.format("pass", "['megatron.nested-nosync']"))


@needs_megatron
def test_what_it_cannot_do_is_one_sentence(monkeypatch):
    monkeypatch.setattr(command, "gpus", lambda: 0)
    with pytest.raises(command.CannotRun, match="torch sees no GPU here"):
        command._world(None, "cuda")
    monkeypatch.setattr(command, "gpus", lambda: 2)
    assert command._world(None, None) == Local(2, "cuda")
    assert command._world(3, "cpu") == Local(3, "cpu")
    assert command._world(3, None) == Local(3, "cuda")
    monkeypatch.setattr(command, "gpus", lambda: 1)
    assert command._world(None, None) == Local(2, "cuda")
    monkeypatch.setattr(command, "is_launched", lambda: True)
    with pytest.raises(command.CannotRun, match="that of the launcher"):
        command._world(3, None)
    monkeypatch.setenv("MASTER_PORT", "0")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(command.CannotRun, match="MASTER_PORT is 0"):
        command._world(None, None)
