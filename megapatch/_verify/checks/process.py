"""Several models in one process, one after the other: each is as if it were the only one."""

from __future__ import annotations

import gc
import weakref
from importlib import import_module
from typing import Any

from ..._python.finding import find_module
from ..check import DP, Check, Layout, expect, same, the_defect

REFIT = "megatron.core.resharding.refit"


def refits_in_turn(layout: Layout = DP) -> float | None:
    """Refit a model of one layer, and then one of two layers; against the parameters that are sent."""
    if find_module(REFIT) is None:
        return None  # to 0.15
    layout.set_up()
    refit = import_module(REFIT)
    unwrap = import_module("megatron.core.utils").unwrap_model
    difference = 0.0
    for layers in (1, 2):
        source, target = layout.model(layers=layers), unwrap(layout.model(layers=layers).chunks[0])
        for parameter in target.parameters():
            parameter.detach().zero_()
        refit.swap_model_weights(source.chunks, target, refit.GlooCopyService())
        found, sent = (_parameters(core) for core in (target, unwrap(source.chunks[0])))
        difference = max(difference, same(found, sent, f"parameters after a refit of {layers} layers"))
    return difference


def _parameters(core: Any) -> dict[str, Any]:
    return {name: parameter.detach() for name, parameter in core.named_parameters()}


def pass_in_inference_mode(layout: Layout = DP) -> None:
    """Run a forward pass in inference mode, and then a step of the same length."""
    import torch

    layout.set_up()
    (chunk,) = layout.model().chunks
    tokens = torch.arange(8, device="cuda").view(1, -1)
    with torch.inference_mode():
        chunk(tokens, tokens, None)  # without a mask of its own
    with the_defect(RuntimeError, says="Inference tensors"):
        chunk(tokens, tokens, None).sum().backward()


def experts_dropped(layout: Layout = DP) -> None:
    """Train a mixture of experts for a step, and drop it."""
    layout.set_up()
    model = layout.model(experts=2)
    model.train_step(0)
    (chunk,) = map(weakref.ref, model.chunks)
    del model
    gc.collect()
    expect(chunk() is None, "a mixture of experts that has trained and was dropped is still there")


CHECKS = (
    Check("megatron.masks-for-training", pass_in_inference_mode),
    Check(
        "megatron.refit-plan-of-its-model",
        refits_in_turn,
        "parameters of a second model after a refit, with those that were sent",
    ),
    Check("megatron.dropped-models-freed", experts_dropped),
)
