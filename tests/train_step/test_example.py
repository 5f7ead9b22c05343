"""The example runs, and shows what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from rigs.where import needs_megatron

EXAMPLE = Path(__file__).parents[2] / "examples" / "accumulate_rollouts.py"


@needs_megatron
@pytest.mark.thorough
def test_rollouts_that_are_accumulated_are_the_step_of_one_call():
    shown = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, check=True).stdout
    norms = re.findall(r"gradient norm (\S+), in one call (\S+)", shown)
    assert len(norms) == 3
    assert all(in_pieces == at_once for in_pieces, at_once in norms)
    assert float(re.search(r"largest difference of a parameter after 3 steps: (\S+)", shown)[1]) <= 1e-6
