"""NeMo-RL's grpo_train() in a real Ray, of the checkout that NEMO_RL_CHECKOUT names.

Stand-ins: the CPU for GPUs, the workers' model (rigs/jobs/nemo_rl.py), rollouts and the engine's side of a refit.
"""

import pytest
from rigs.jobs.job import JOBS, TESTS, assert_alike, both_ways
from rigs.variables import folder_in

CHECKOUT = folder_in("NEMO_RL_CHECKOUT")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not CHECKOUT, reason="NEMO_RL_CHECKOUT is not set"),
    pytest.mark.skipif(
        bool(folder_in("MEGATRON_CHECKOUT")), reason="runs with the wheel: MEGATRON_CHECKOUT is set"
    ),
]
ENVIRONMENT = {
    "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",  # the workers' Python is the driver's
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "TORCH_CUDA_ARCH_LIST": "9.0",
}


def test_four_steps(tmp_path):
    plain, patched = both_ways(
        tmp_path, JOBS / "nemo_rl_grpo.py", "", reach="--with-megapatch", paths=[CHECKOUT, TESTS], env=ENVIRONMENT
    )
    assert plain.code == 0
    assert len([line for line in plain.printed["all"] if line.startswith("JOB")]) == 4
    assert "nemo_rl.train-after-exception" in patched.applied
    assert_alike(plain, patched)
