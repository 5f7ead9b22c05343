"""Optimizer steps made of several calls, by hand, as frameworks make them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

ADAM: dict[str, Any] = {"optimizer": "adam", "lr": 0.1, "optim": {"adam_eps": 1.0}}
"""With a large epsilon Adam is nearly SGD; the usual one hides a gradient that is wrong by a factor."""
OVERLAP: dict[str, Any] = {"overlap_grad_reduce": True}
SHARDED: dict[str, Any] = {**ADAM, "use_distributed_optimizer": True}
BOTH: dict[str, Any] = {**SHARDED, **OVERLAP, "overlap_param_gather": True}


def step_in_calls(model: Any, step: int, calls: int, *, finishing: str = "after", no_sync: bool = False) -> Any:
    """Make one optimizer step of several calls of two microbatches; return the gradients that the optimizer saw.

    Args:
        model: a TinyGPT.
        step: selects the data.
        calls: number of calls.
        finishing: "after": gradients are finished after the last call; "last": in it.
        no_sync: whether all calls but the last are in no_sync().
    """
    config = model.config
    finalize, grad_sync = config.finalize_model_grads_func, config.grad_sync_func
    model.zero_grad()
    try:
        for call in range(calls):
            last = call == calls - 1
            config.finalize_model_grads_func = finalize if last and finishing == "last" else None
            config.grad_sync_func = grad_sync if last else None
            with contextlib.ExitStack() as outer:
                for chunk in () if last or not no_sync else model.chunks:
                    outer.enter_context(chunk.no_sync())
                model.forward_backward(10 * step + call)
    finally:
        config.finalize_model_grads_func, config.grad_sync_func = finalize, grad_sync
    if finishing == "after":
        finalize(model.chunks, None)
    gradients = model.gradients()
    model.optimizer.step()
    return gradients


@contextlib.contextmanager
def fast_network() -> Iterator[None]:
    """Reduce each bucket group before anything else happens.

    On a slow network, gradients that a backward pass adds after a reduce has begun may be included by chance.
    """
    from unittest import mock

    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    start = Group.start_grad_sync

    def start_and_wait(group: Any, *args: Any, **kwargs: Any) -> Any:
        before = group.grad_reduce_handle
        result = start(group, *args, **kwargs)
        if group.grad_reduce_handle is not None and group.grad_reduce_handle is not before:
            group.grad_reduce_handle.wait()
        return result

    with mock.patch.object(Group, "start_grad_sync", start_and_wait):
        yield


def sequence(model: Any, calls: Sequence[int], **options: Any) -> list[Any]:
    """Make a step of each number of calls; return the gradients of each step."""
    return [step_in_calls(model, step, count, **options) for step, count in enumerate(calls)]
