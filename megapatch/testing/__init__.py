"""The real megatron-core on CPU: several local ranks over gloo, a tiny GPT, the real schedules and optimizers.

    from megapatch.testing import init_parallel, run_ranks, tiny_gpt

    def job(rank, world_size):                    # at module level: it is sent to other processes
        init_parallel(pp=2)
        model = tiny_gpt(overlap_grad_reduce=True, use_distributed_optimizer=True, optimizer="adam")
        return [model.train_step(step).loss for step in range(3)]

    def test_losses_fall():
        first, second = run_ranks(job, 2)
        assert first == second and first[0] > first[-1]

Weights depend only on parameters' names, and data only on the step. So every layout (tensor, pipeline, expert,
data parallel) can be compared with every other, and with a single process. No part of Megatron is imitated.
"""

from __future__ import annotations

from ..errors import RanksFailed, RanksTimedOut
from ._availability import megatron_core_available, megatron_training_available
from ._cuda_stubs import install_cuda_stubs
from ._data import microbatches
from ._gloo import use_one_gloo_thread
from ._model import TinyGPT, TinyStepResult, mean_loss
from ._parallel import destroy_parallel, init_parallel
from ._ranks import run_ranks
from ._tiny_gpt import tiny_gpt
from ._training_loop import Fault, MegatronLoop

__all__ = [
    "Fault",
    "MegatronLoop",
    "RanksFailed",
    "RanksTimedOut",
    "TinyGPT",
    "TinyStepResult",
    "destroy_parallel",
    "init_parallel",
    "install_cuda_stubs",
    "mean_loss",
    "megatron_core_available",
    "megatron_training_available",
    "microbatches",
    "run_ranks",
    "tiny_gpt",
    "use_one_gloo_thread",
]
