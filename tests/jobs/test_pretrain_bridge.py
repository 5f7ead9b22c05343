"""Megatron-Bridge's pretrain(), by torchrun at 2 ranks: straight, twice in a process, killed and resumed."""

import pytest
from rigs.jobs.job import JOBS, assert_alike, both_ways

from megapatch._finding import find_module

pytestmark = pytest.mark.skipif(
    any(find_module(name) is None for name in ("megatron.bridge", "nvidia_resiliency_ext", "omegaconf")),
    reason="Megatron-Bridge is not installed with what it needs: see tox -e jobs",
)
SCRIPT = JOBS / "pretrain_bridge.py"


@pytest.mark.parametrize("calls", ["5", pytest.param("3,5", marks=pytest.mark.nightly)])
def test_one_call_and_two(tmp_path, calls):
    plain, patched = both_ways(tmp_path, SCRIPT, calls)
    assert plain.code == 0
    assert len([line for line in plain.printed["1/stderr.log"] if line.startswith("iteration")]) == 5
    assert "megatron.train-reentry" in patched.applied
    assert_alike(plain, patched)


@pytest.mark.nightly
def test_a_run_that_is_killed_and_resumes(tmp_path):
    killed = both_ways(tmp_path, SCRIPT, "5", env={"JOB_AT": "kill 4"})
    assert [job.code for job in killed] == [1, 1]
    plain, patched = both_ways(tmp_path, SCRIPT, "5")
    assert plain.code == 0
    assert_alike(plain, patched)
