"""Set up and take down model-parallel layouts, as often as a test needs."""

from __future__ import annotations

import gc
from typing import Any

from .._mcore.process_groups import process_groups

# Megatron leaves the process groups of a layout behind (NVIDIA/Megatron-LM#6902). With gloo each has threads and
# sockets of its own: about 50 threads and 70 file descriptors a layout.
_of_layout: list[Any] = []


def init_parallel(
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    ep: int = 1,
    cp: int = 1,
    expert_tp: int | None = None,
    seed: int = 123,
    optimizer_instances: int = 1,
) -> None:
    """Split the world into model-parallel groups, and seed Megatron's random state.

    The remaining dimension is data parallel. An existing layout is taken down first.

    Args:
        tp: tensor parallel size, in ranks.
        pp: pipeline parallel size, in ranks.
        vpp: virtual pipeline stages per rank; None: no virtual stages.
        ep: expert parallel size, in ranks.
        cp: context parallel size, in ranks. `tiny_gpt` needs ``attention=False`` then: its attention on CPU takes
            whole sequences.
        expert_tp: tensor parallel size of experts, in ranks; None: that of the rest of the model.
        seed: of Megatron's random state on the first pipeline stage.
        optimizer_instances: distributed optimizers that the data-parallel ranks are divided into, each of which
            has all of the optimizer state. The model's DistributedDataParallelConfig needs the same number as
            ``num_distributed_optimizer_instances``.

    Raises:
        RuntimeError: as Megatron raises it, the sizes do not fit the number of ranks.
        AssertionError: likewise.
    """
    from megatron.core import parallel_state, tensor_parallel

    destroy_parallel()
    _destroy_process_groups()
    before = process_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=expert_tp,
        num_distributed_optimizer_instances=optimizer_instances,
    )
    _of_layout.extend(group for group in process_groups() if group not in before)
    # Stages differ by as much as in Megatron's own initialization.
    stage = parallel_state.get_pipeline_model_parallel_rank()
    tensor_parallel.model_parallel_cuda_manual_seed(seed + 100 * stage)


def destroy_parallel() -> None:
    """Take down the layout, so that `init_parallel` can set up another in the same processes.

    A collective. The layout's process groups stay until the next `init_parallel`, as a model may still use them,
    but for the gloo groups that Megatron destroys itself.
    """
    import torch
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        torch.distributed.barrier()  # a rank may still be connecting those of gloo
        parallel_state.destroy_model_parallel()
        # megatron-core 0.12 leaves these, and a stage without position embeddings then looks for its old group.
        parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None


def _destroy_process_groups() -> None:
    """Destroy the groups of the last layout, once all ranks are done with it."""
    import torch

    if _of_layout:
        torch.distributed.barrier()
    there = process_groups()
    while _of_layout:
        if (group := _of_layout.pop()) in there:  # the caller may have destroyed it
            torch.distributed.destroy_process_group(group)
    # A model's hooks refer to it and it to its groups, whose threads end with the last reference.
    gc.collect()
