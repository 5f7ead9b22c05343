"""The example learns, and shows what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "streaming_rl.py"


@pytest.mark.thorough
@pytest.mark.skipif(not (find_spec("torch") and find_spec("megatron")), reason="needs torch and megatron-core")
def test_it_learns_as_rollouts_arrive_and_on_policy_it_is_synchronous_training(tmp_path):
    plot = tmp_path / "plot.png"
    command = [sys.executable, EXAMPLE, "--steps", "16", "--plot", str(plot)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    shown = done.stdout
    assert done.returncode == 0, shown + done.stderr
    streaming, on_policy = re.findall(r"at most (\d) and on average (\S+) versions behind", shown)
    assert float(streaming[1]) > 0 and int(streaming[0]) <= 2
    assert on_policy == ("0", "0.00")
    found, expected = re.search(r"on-policy (\S+), synchronous (\S+)", shown).groups()
    assert found == expected and float(found)
    assert float(re.search(r"largest difference of a parameter: (\S+)", shown)[1]) <= 1e-6
    first, *_, last = re.findall(r"to \d+ +(0\.\d+|1\.00) #+ +(0\.\d+|1\.00) #+", shown)
    assert all(float(end) > float(begin) + 0.2 for begin, end in zip(first, last, strict=True))
    assert plot.exists() == bool(find_spec("matplotlib"))
    assert ("matplotlib is not installed" in shown) != plot.exists()
