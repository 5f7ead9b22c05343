"""Layouts as a trainer sets them up, which leaves the groups of the last one to megapatch, and what they take."""

import gc
import importlib
import os
import weakref
import zlib
from typing import NamedTuple

import torch

from megapatch._mcore.process_groups import process_groups
from megapatch.testing import destroy_parallel, tiny_gpt

SHARDED = {"optimizer": "adam", "use_distributed_optimizer": True}


def experts(dispatcher):
    """Return the options of a mixture of experts."""
    return {**SHARDED, "dtype": "bf16", "experts": 2, "config": {"moe_token_dispatcher_type": dispatcher}}


def initialize(**sizes):
    """Set up a layout by Megatron's own function; return parallel_state."""
    state = importlib.import_module("megatron.core.parallel_state")
    state.initialize_model_parallel(**sizes)
    return state


def resources():
    """Return the numbers of process groups, threads and file descriptors of this process."""
    return len(process_groups()), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


class Left(NamedTuple):
    """Leftovers of a layout and its model after both were dropped, and what the model did."""

    alive: int  # of the model's objects
    size: int  # bytes of all tensors
    groups: int
    steps: list[tuple[float, float]]  # losses and gradient norms
    weights: dict[str, int]  # checksums


def cycles(count, options, **sizes):
    """Set up a layout, train a model and drop both, `count` times; return what is left after each."""
    found = []
    for _ in range(count):
        initialize(**sizes)
        importlib.import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(1)
        model = tiny_gpt(**options)
        steps = [model.train_step(step) for step in range(2)]
        weights = {name: zlib.crc32(value.detach().float().numpy()) for name, value in model.parameters().items()}
        parts = [part for chunk in model.chunks for part in (chunk, *chunk.parameters(), *chunk.buffers)]
        watched = [*map(weakref.ref, parts), weakref.ref(model.optimizer)]
        del model, parts
        gc.collect()
        tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
        alive, numbers = sum(one() is not None for one in watched), [(step.loss, step.grad_norm) for step in steps]
        found.append(Left(alive, sum(storages.values()), resources()[0], numbers, weights))
        del tensors
        destroy_parallel()
    return found
