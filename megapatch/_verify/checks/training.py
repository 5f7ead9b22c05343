"""Megatron's own functions, called again: train(), the set-up of layouts, and the end of a step with FSDP2."""

from __future__ import annotations

from importlib import import_module

from ..check import DP, Check, Layout, expect, same, the_defect
from ._steps import OVERLAP


def train_twice(layout: Layout = DP) -> float | None:
    """Call train() twice, of one step each; against plain steps, in which train() had no part."""
    from ...testing import MegatronLoop, megatron_training_available

    if not megatron_training_available():
        return None  # wheels have it from 0.17 on
    layout.set_up()
    plain = layout.model(lr=0.1)
    for step in range(2):
        plain.train_step(step)
    loop = MegatronLoop(layout.model(hooks=False, lr=0.1, **OVERLAP))
    loop.train(1)
    with the_defect(AssertionError):
        loop.train(1)
    return same(loop.model.parameters(), plain.parameters(), "parameters")


def layouts_in_turn(layout: Layout = DP) -> None:
    """Set up three layouts, one after the other, and count the process groups that stay."""
    import torch

    from ..._mcore.process_groups import process_groups

    state = import_module("megatron.core.parallel_state")
    counts = []
    for _ in range(3):
        state.initialize_model_parallel()
        counts.append(len(process_groups()))
        torch.distributed.barrier()  # a rank may still be connecting gloo groups, which Megatron destroys at once
        state.destroy_model_parallel()
    expect(counts[0] == counts[-1], f"process groups stay: {', '.join(map(str, counts))} of them")


def gradients_of_fsdp2(layout: Layout = DP) -> None:
    """Finish gradients of TorchFullyShardedDataParallel as finalize_model_grads() does."""
    from ...patches._diagnosis import missing_names
    from ...patches.megatron import torch_fsdp2_finalize

    package = import_module("megatron.core.distributed")
    fsdp2 = object.__new__(package.TorchFullyShardedDataParallel)
    with the_defect(TypeError, says="force_all_reduce"):
        if missing_names(torch_fsdp2_finalize.FINALIZE, torch_fsdp2_finalize.KEYWORD):
            fsdp2.finish_grad_sync()
        else:
            fsdp2.finish_grad_sync(force_all_reduce=False)


CHECKS = (
    Check("megatron.train-reentry", train_twice, "parameters after two calls of train(), with plain steps"),
    Check("megatron.groups-destroyed", layouts_in_turn),
    Check("megatron.torch-fsdp2-finalize", gradients_of_fsdp2),
)
