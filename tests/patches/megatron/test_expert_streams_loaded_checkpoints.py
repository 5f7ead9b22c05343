"""megatron.expert-streams-loaded: checkpoints that Megatron's own get_rng_state() makes, of two expert ranks."""

import os
from types import SimpleNamespace
from unittest import mock

import torch
from rigs.cells import cells_of
from rigs.megatron.options import Log, needs_training

from megapatch.testing import init_parallel

pytestmark = needs_training


def by_megatron(folder, each_its_own):
    """Save by Megatron's own get_rng_state(), and load as its load_checkpoint() does."""
    from megatron.core import dist_checkpointing, mpu
    from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.training import checkpointing

    def state():
        groups = mpu.get_tensor_model_parallel_group(), mpu.get_pipeline_model_parallel_group()
        return {"rng_state": checkpointing.get_rng_state("torch_dist", *groups)}

    args = SimpleNamespace(data_parallel_random_init=each_its_own)
    model_parallel_cuda_manual_seed(1)
    with mock.patch.object(checkpointing, "get_args", return_value=args):
        os.makedirs(folder, exist_ok=True)
        torch.distributed.barrier()
        dist_checkpointing.save(state(), folder)
        model_parallel_cuda_manual_seed(1)
        loaded = dist_checkpointing.load(state(), folder)["rng_state"]
    log = Log()
    get_cuda_rng_tracker().set_states(
        loaded[mpu.get_data_parallel_rank() if each_its_own else 0]["rng_tracker_states"]
    )
    return [text for text in log.texts if "expert-streams-loaded" in text]


def job(rank, world_size, folder):
    init_parallel(ep=2)
    for each_its_own in (True, False):  # the second one warns, and a tracker warns once
        yield each_its_own, lambda own=each_its_own: by_megatron(f"{folder}-{own}", own)


patched = cells_of(job, 2, folder="patched")


def test_the_second_rank_loads_the_first_ones(patched):
    of_the_first, (text,) = (found[False] for found in patched)
    assert of_the_first == []
    assert "expected one that was seeded with 1125, found 1025." in text


def test_with_data_parallel_random_init_each_rank_loads_its_own(patched):
    assert [found[True] for found in patched] == [[], []]
