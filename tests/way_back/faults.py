"""Places in a step that raise, on all ranks alike."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from rigs.megatron.options import Interrupted
from rigs.step_state import interrupted

from .pictures import parts_of
from .plan import REPLAYED


def raising(model, place, microbatch=1):
    """Return a context in which the next step of the model raises Interrupted at this place.

    microbatch   the one during whose pass to raise, from 0 on; the ones before have left gradients
    """
    if place == "in the forward pass":
        return _in_a_pass(model, microbatch, backward=False)
    if place == "in the backward pass":
        return _in_a_pass(model, microbatch, backward=True)
    if place == REPLAYED:
        return _in_a_replay(model, microbatch)
    if place == "in the optimizer":
        return _in_the_optimizer(model)
    return interrupted(model, "after finalize" if place == "after the reduce" else "before finalize")[0]


def raises(*args, **kwargs):
    raise Interrupted


@contextlib.contextmanager
def _in_a_pass(model, microbatch, backward):
    """Raise between the layers, of which one has routed, counted or accumulated already."""
    passes = iter(range(100))

    def after_a_layer(layer, arguments, output):
        if next(passes) == microbatch:
            if not backward:
                raise Interrupted
            hidden = output[0] if isinstance(output, tuple) else output
            hidden.register_hook(raises)

    handle = _decoder(model).layers[0].register_forward_hook(after_a_layer)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _in_a_replay(model, microbatch):
    """Raise in the backward pass of a step whose tokens all take the routes to the first experts.

    Routes are set before each microbatch, as trainers do that replay those of the rollout.
    """
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    decoder = _decoder(model)
    routers = [layer.mlp.router for layer in decoder.layers]

    def set_routes(*_):
        for router in routers:
            topk = router.config.moe_router_topk
            router.router_replay.set_target_indices(torch.arange(topk).expand(2 * model.seq, topk))
            router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    handle = decoder.register_forward_pre_hook(set_routes)
    try:
        with _in_a_pass(model, microbatch, backward=True):
            yield
    finally:
        handle.remove()


def _decoder(model):
    chunk = model.chunks[0].module
    while not hasattr(chunk, "decoder"):  # Float16Module
        chunk = chunk.module
    return chunk.decoder


@contextlib.contextmanager
def _in_the_optimizer(model):
    """Raise where torch's optimizer would step: gradients are unscaled, and the loss scale has moved."""
    with contextlib.ExitStack() as stack:
        for part in parts_of(model.optimizer):
            stack.enter_context(mock.patch.object(part.optimizer, "step", raises))
        yield
