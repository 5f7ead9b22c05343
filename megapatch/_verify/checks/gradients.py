"""Gradients that are reduced twice, too early, or not at all."""

from __future__ import annotations

from ..check import DP, Check, Layout, expect, same, the_defect
from ._steps import OVERLAP, fast_network, sequence, step_in_calls


def calls_in_varying_number(layout: Layout = DP) -> float | None:
    """Steps of several calls whose gradients are finished after the last one, as SkyRL makes them."""
    layout.set_up()
    if not hasattr(layout.model(**OVERLAP).chunks[0].bucket_groups[0], "is_first_batch"):
        return None  # up to 0.15 a step has one call
    largest = 0.0
    for calls in ((1, 2, 3), (2, 1)):
        with fast_network(), the_defect(AssertionError, says="has not been issued|outstanding at once"):
            found = sequence(layout.model(**OVERLAP), calls)
        expected = sequence(layout.model(), calls)
        for step, gradients in enumerate(expected):
            what = f"step {step + 1} of {len(calls)}, of {calls[step]} calls: gradients"
            largest = max(largest, same(found[step], gradients, what))
    return largest


def no_sync_in_no_sync(layout: Layout = DP) -> float:
    """Calls in a caller's no_sync(), each of which uses no_sync() itself."""
    layout.set_up()
    largest = 0.0
    model, plain = layout.model(**OVERLAP), layout.model()
    for step, calls in enumerate((1, 2, 2)):
        with fast_network(), the_defect(AssertionError):
            found = step_in_calls(model, step, calls, finishing="last", no_sync=True)
        expected = step_in_calls(plain, step, calls, finishing="last")
        largest = max(largest, same(found, expected, f"step {step + 1}, of {calls} calls: gradients"))
    (ddp, *_) = layout.model(**OVERLAP).chunks
    with ddp.no_sync():
        with ddp.no_sync():
            pass
        held = not any(group.is_last_microbatch for group in ddp.bucket_groups)
        expect(held, "the exit of an inner no_sync() has ended the outer one")
    return largest


def layer_without_gradients(layout: Layout = DP) -> float:
    """A step in which the output of a layer is not used."""
    layout.set_up()
    model, plain = layout.model(**OVERLAP), layout.model()
    for trained in (model, plain):
        trained.train_step(0)
        layer = trained.chunks[0].module.decoder.layers[0]
        layer.forward = lambda hidden_states, *args, **kwargs: (hidden_states, None)
    plain.train_step(1)
    with the_defect(AssertionError):
        model.train_step(1)
    return same(model.parameters(), plain.parameters(), "parameters")


CHECKS = (
    Check(
        "megatron.grad-ready-window",
        calls_in_varying_number,
        "gradients of steps of 1, 2, 3 and of 2, 1 calls, with a run without overlap",
        layouts=True,
    ),
    Check(
        "megatron.nested-no-sync",
        no_sync_in_no_sync,
        "gradients of steps of 1, 2, 2 calls in no_sync(), with a run without overlap",
        layouts=True,
    ),
    Check(
        "megatron.parameters-without-gradients",
        layer_without_gradients,
        "parameters after a step in which a layer has no gradients, with a run without overlap",
    ),
)
