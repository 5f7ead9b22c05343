"""Megatron's own functions, called again: train(), the set-up of layouts, and the end of a step with FSDP2. And
ordinary steps, which meet no defect: they ask no more of the processes with patches than without."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

from ..check import DP, Check, Layout, expect, same, the_defect
from ._steps import BOTH, OVERLAP


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
    from ..._mcore.process_groups import process_groups
    from ...testing import destroy_parallel

    state = import_module("megatron.core.parallel_state")
    counts = []
    for _ in range(3):
        state.initialize_model_parallel()
        counts.append(len(process_groups()))
        destroy_parallel()
    expect(counts[0] == counts[-1], f"process groups stay: {', '.join(map(str, counts))} of them")


def gradients_of_fsdp2(layout: Layout = DP) -> None:
    """Finish gradients of TorchFullyShardedDataParallel as finalize_model_grads() does."""
    from ...patches._diagnosis import unmet
    from ...patches.megatron import torch_fsdp2_finalize

    package = import_module("megatron.core.distributed")
    fsdp2 = object.__new__(package.TorchFullyShardedDataParallel)
    with the_defect(TypeError, says="force_all_reduce"):
        if unmet.names(torch_fsdp2_finalize.FINALIZE, torch_fsdp2_finalize.KEYWORD):
            fsdp2.finish_grad_sync()
        else:
            fsdp2.finish_grad_sync(force_all_reduce=False)


STEPS = 3


def ordinary_steps(layout: Layout = DP) -> None:
    """List the collectives, messages and waits of the host of steps, without patches and with them.

    Those of the first step may come in another order: megatron.grad-ready-window holds its reduces back.
    """
    from ..._api import apply, restore

    layout.set_up()
    for options in (OVERLAP, BOTH):
        restore()
        without = _listed(layout, options)
        apply()
        with_patches = _listed(layout, options)
        for step, (ours, megatrons) in enumerate(zip(with_patches, without, strict=True), start=1):
            more, less = _beyond(ours, megatrons), _beyond(megatrons, ours)
            expect(not more, f"step {step} has with patches in addition: {more}")
            expect(not less, f"step {step} has without patches in addition: {less}")
            expect(step == 1 or ours == megatrons, f"step {step} has another order with patches")


def _listed(layout: Layout, options: dict[str, object]) -> list[list[str]]:
    from ..operations import Operations

    model = layout.model(**options)
    found = []
    for step in range(STEPS):
        with Operations() as operations:
            model.train_step(step)
        found.append([repr(operation) for operation in operations.found])
    return found


def _beyond(some: list[str], others: list[str]) -> list[str]:
    return list((Counter(some) - Counter(others)).elements())


CHECKS = (
    Check("megatron.train-reentry", train_twice, "parameters after two calls of train(), with plain steps"),
    Check("megatron.groups-destroyed", layouts_in_turn),
    Check("megatron.torch-fsdp2-finalize", gradients_of_fsdp2),
    Check("ordinary-steps", ordinary_steps, layouts=True, audited=False),
)
