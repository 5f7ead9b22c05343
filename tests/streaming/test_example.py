"""The example learns, shows what streaming gains, and fails when it gains nothing."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from rigs.command import heed_ctrl_c
from rigs.variables import folder_in
from rigs.where import needs_megatron

EXAMPLE = Path(__file__).parents[2] / "examples" / "streaming_rl.py"


@pytest.mark.thorough
@needs_megatron
@pytest.mark.nightly
def test_it_learns_faster_as_rollouts_arrive_and_on_policy_it_is_synchronous_training(tmp_path):
    plot = tmp_path / "plot.png"
    done = subprocess.run([sys.executable, EXAMPLE, "--plot", plot], capture_output=True, text=True, timeout=300)
    shown = done.stdout
    assert done.returncode == 0, shown + done.stderr
    streaming, on_policy = re.findall(r"at most (\d) and on average (\S+) versions behind", shown)
    assert float(streaming[1]) > 0 and int(streaming[0]) <= 2
    assert on_policy == ("0", "0.00")
    assert float(re.search(r"Streaming is (\S+) times as fast", shown)[1]) >= 1.2
    found, expected = re.search(r"on-policy (\S+), synchronous (\S+)", shown).groups()
    assert found == expected and float(found)
    assert float(re.search(r"largest difference of a parameter: (\S+)", shown)[1]) <= 1e-6
    for name in ("streaming", "on-policy"):
        first, *_, last = re.findall(rf"{name} +step +\d+  mean reward (\S+) #+", shown)
        assert float(last) > float(first) + 0.2
    assert plot.exists() == bool(find_spec("matplotlib"))
    assert ("matplotlib is not installed" in shown) != plot.exists()


@pytest.mark.thorough
@needs_megatron
@pytest.mark.nightly
@pytest.mark.parametrize(("framework", "least"), [("nemo_rl", 0.5), ("slime", 0.1)])
def test_a_framework_as_its_parts(framework, least):
    if framework == "slime" and (Path(folder_in("SLIME_CHECKOUT") or "none") / "miles").is_dir():
        pytest.skip("the checkout is one of miles")
    command = [sys.executable, "-W", "ignore", EXAMPLE.with_name(f"streaming_{framework}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 6 and losses[-1] < losses[0] - least, done.stdout


@pytest.mark.thorough
@needs_megatron
def test_ctrl_c_ends_it_cleanly(tmp_path):
    command = [sys.executable, EXAMPLE, "--plot", tmp_path / "plot.png"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = {**os.environ, "MEGAPATCH_QUIET": "1"}
    with subprocess.Popen(command, **pipes, env=env, preexec_fn=heed_ctrl_c) as example:
        while "step  5" not in (line := example.stdout.readline()):
            assert line, example.stderr.read()
        example.send_signal(signal.SIGINT)
        _, errors = example.communicate(timeout=120)
    assert (example.returncode, errors) == (130, "\ninterrupted\n")


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    for name in ("streaming_rl", "_streaming_rl_processes"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("streaming_rl")


@pytest.mark.parametrize(
    ("seconds", "rewards", "speed_up", "failure"),
    [
        (1.0, [0.5, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0], 2.0, None),
        (1.7, [0.5, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0], 2 / 1.7, "10.2 s, which is not 1.2 times as fast as"),
        (1.0, [0.5, 0.9, 1.0, 1.0, 1.0, 1.0, 0.7], 2.0, "ended at a mean reward of 0.94, more than 0.05 below"),
        (1.0, [0.5] * 7, None, "streaming did not reach a mean reward of 0.9 in 7 steps"),
    ],
    ids=["holds", "not faster", "worse", "not learned"],
)
def test_what_it_claims_is_judged(example, seconds, rewards, speed_up, failure):
    def run(name, seconds_of_a_step, rewards):
        made = example.Run(name, None, len(rewards))
        made.seconds = [seconds_of_a_step * step for step in range(1, len(rewards) + 1)]
        made.rewards = rewards
        return made

    on_policy = run("on-policy", 2.0, [0.5, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0])
    found, why = example.judge(run("streaming", seconds, rewards), on_policy)
    assert found == pytest.approx(speed_up)
    assert why is None if failure is None else failure in why
