"""NeMo-RL's grpo_train() in a real Ray, of the checkout that NEMO_RL_CHECKOUT names.

Stand-ins: the CPU for GPUs, the workers' model (rigs/jobs/nemo_rl.py), rollouts and the engine's side of a refit.
"""

import pytest
from rigs.jobs.job import JOBS, TESTS, assert_same_training, both_ways
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


def train(folder, **more):
    return both_ways(
        folder,
        JOBS / "nemo_rl_grpo.py",
        "",
        reach="--with-megapatch",
        paths=[CHECKOUT, TESTS],
        env={**ENVIRONMENT, **more},
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return train(tmp_path_factory.mktemp("straight"))


def test_four_steps(straight):
    assert_same_training(*straight, 4, "nemo_rl.train-after-exception")


def test_a_step_that_failed_is_done_again(tmp_path, straight):
    """nemo_rl.train-after-exception: plain the second grpo_train() fails, too."""
    plain, patched = train(tmp_path, JOB_FAIL="10")  # in the third step
    assert plain.code == 1
    assert plain.lines("JOB step") == straight[0].lines("JOB step")[:2]
    assert any("UnboundLocalError" in line for line in plain.printed["all"])
    assert patched.code == 0
    assert any("ConnectionError: a loss that fails" in line for line in patched.printed["all"])
    assert patched.lines("JOB step") == straight[0].lines("JOB step")
