"""Places in a step that raise, on all ranks alike."""

from __future__ import annotations

import contextlib
from unittest import mock

from rigs.megatron.options import Interrupted

from .pictures import parts_of


def raising(model, place, microbatch=1):
    """Return a context in which the next step of the model raises Interrupted at this place.

    microbatch   the one during whose pass to raise, from 0 on; the ones before have left gradients
    """
    if place == "in the forward pass":
        return _in_a_pass(model, microbatch, backward=False)
    if place == "in the backward pass":
        return _in_a_pass(model, microbatch, backward=True)
    if place == "in the optimizer":
        return _in_the_optimizer(model)
    return _around_finalize(model, first=place == "after the reduce")


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

    chunk = model.chunks[0].module
    while not hasattr(chunk, "decoder"):  # Float16Module
        chunk = chunk.module
    handle = chunk.decoder.layers[0].register_forward_hook(after_a_layer)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _around_finalize(model, first):
    finalize = model.config.finalize_model_grads_func

    def finalize_or_raise(*args, **kwargs):
        if first:
            finalize(*args, **kwargs)
        raise Interrupted

    model.config.finalize_model_grads_func = finalize_or_raise
    try:
        yield
    finally:
        model.config.finalize_model_grads_func = finalize


@contextlib.contextmanager
def _in_the_optimizer(model):
    """Raise where torch's optimizer would step: gradients are unscaled, and the loss scale has moved."""
    with contextlib.ExitStack() as stack:
        for part in parts_of(model.optimizer):
            stack.enter_context(mock.patch.object(part.optimizer, "step", raises))
        yield
