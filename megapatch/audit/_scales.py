"""scaled-once and unscaled-once: the loss is multiplied by the loss scale, and gradients are divided by it, once.

Symptom   with fp16 the optimizer divides gradients by a loss scale that the loss was never multiplied by, or was
          at another value; or only the main loss was, and not those of routers and of multi-token prediction; or
          gradients are divided twice. Nothing fails; the gradient norm in the log is small.
Upstream  NovaSky-AI/SkyRL#1212, THUDM/slime#1842.
Seam      get_loss_scale() of the mixed-precision optimizer shows whether anybody asked for the scale between
          zeroing and the step, as scale_loss() does; its division shows how often gradients were divided. The
          hooks of the config, as a forward-backward call begins, show what auxiliary losses will be multiplied
          by.
Limits    what was asked for is taken for applied. A trainer that reads `optimizer.grad_scaler.scale` itself is
          taken for one that does not scale; one that logs the scale between zeroing and the step, for one that
          does.
Cost      no sync unless something looks wrong.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

from ..patch import Patch
from ._findings import LEDGER, observes
from ._gradients import Events
from ._optimizers import ddps_of
from ._sites import site

_asked: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""By optimizer: the loss scale that was asked for since its last step."""
_asks = itertools.count(1)
_last_ask: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""By chunk: the number of the last time that anybody asked for the loss scale of one of its optimizers."""
_asks_before: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""By optimizer: the same, as its last step ended."""
_divided: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()
"""By optimizer: the gradients as they were once it had divided them."""
_unscaled_losses: weakref.WeakSet[Any] = weakref.WeakSet()
"""Chunks whose auxiliary losses were not multiplied by any scale since the last step."""


# ------------------------------------------------------------------------ what happens
def watch_loss_scale(get_loss_scale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_loss_scale)
    def patched_get_loss_scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        scale = get_loss_scale(self, *args, **kwargs)
        _note_ask(self, scale)
        return scale

    return patched_get_loss_scale


@observes
def _note_ask(optimizer: Any, scale: Any) -> None:
    _asked[optimizer] = scale
    number = next(_asks)
    for ddp in ddps_of(optimizer):
        _last_ask[ddp] = number


def watch_division(unscale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(unscale)
    def patched_unscale_main_grads_and_check_for_nan(self: Any, *args: Any, **kwargs: Any) -> Any:
        _before_division(self)
        result = unscale(self, *args, **kwargs)
        _after_division(self)
        return result

    return patched_unscale_main_grads_and_check_for_nan


@observes
def _before_division(optimizer: Any) -> None:
    again = _divided.get(optimizer) == _gradients_now(optimizer) and _divides_buffers(optimizer)
    if again and _scale(optimizer) != 1:
        LEDGER.report("unscaled-once", "again", "gradients were divided by the loss scale again")
    _compare_scales(optimizer)


@observes
def _after_division(optimizer: Any) -> None:
    _divided[optimizer] = _gradients_now(optimizer)


def _gradients_now(optimizer: Any) -> tuple[int, ...]:
    """Return what changes whenever a gradient arrives, or a buffer is changed in place."""
    return (*Events.now(), *(buffer.grad_data._version for buffer in _buffers(optimizer)))


def _buffers(optimizer: Any) -> list[Any]:
    return [buffer for ddp in ddps_of(optimizer) for buffer in [*ddp.buffers, *ddp.expert_parallel_buffers]]


def _compare_scales(optimizer: Any) -> None:
    """Report a scale that changed after the loss was multiplied by it. (It changes by being replaced.)"""
    asked, scale = _asked.get(optimizer), optimizer.grad_scaler.scale
    if asked is not None and asked is not scale and float(asked) != float(scale):
        what = f"the loss was scaled by {float(asked):g}, and its gradients are divided by {float(scale):g}"
        LEDGER.report("scaled-once", "changed", what)


def _divides_buffers(optimizer: Any) -> bool:
    """Return whether the gradients that are divided are the model's own, rather than copies made for each step."""

    def storage(tensor: Any) -> int:
        return int(tensor.untyped_storage().data_ptr())

    buffers = {storage(buffer.grad_data) for buffer in _buffers(optimizer)}
    divided = [] if optimizer.is_stub_optimizer else optimizer._collect_main_grad_data_for_unscaling()
    return any(storage(grad) in buffers for grad in divided)


@observes
def note_call(chunks: list[Any]) -> None:
    """Note what a forward-backward call that begins will multiply auxiliary losses by."""
    config = chunks[0].config
    if config.grad_scale_func is None and _has_auxiliary_losses(config):
        _unscaled_losses.update(chunks)


def _has_auxiliary_losses(config: Any) -> bool:
    routers = getattr(config, "num_moe_experts", None) and not getattr(config, "moe_grad_scale_func", None)
    coefficients = [getattr(config, "moe_aux_loss_coeff", 0), getattr(config, "moe_z_loss_coeff", None)]
    predictions = getattr(config, "mtp_num_layers", None) and not getattr(config, "mtp_grad_scale_func", None)
    return bool(routers and any(coefficients)) or bool(predictions)


# ------------------------------------------------------------------------ what a step finds
@observes
def begin_step(parts: list[Any], ddps: list[Any], has_gradients: bool) -> None:
    """Judge, as an optimizer step begins, what the losses were multiplied by.

    Args:
        parts: the optimizers that divide gradients.
        has_gradients: whether any gradient has arrived since the last step.
    """
    scaled = [part for part in parts if getattr(part, "grad_scaler", None) is not None]
    if not scaled or not has_gradients:
        return
    asked = max(_last_ask.get(ddp, 0) for ddp in ddps)  # those of the gradients
    before = max(_asks_before.get(part, 0) for part in scaled)
    if asked <= before and _is_last_stage() and _scale(scaled[0]) != 1:
        LEDGER.report(
            "scaled-once", "loss", "the optimizer divides by a loss scale that nobody multiplied the loss by"
        )
    if any(ddp in _unscaled_losses for ddp in ddps) and _scale(scaled[0]) != 1:
        LEDGER.report(
            "scaled-once",
            "auxiliary",
            "auxiliary losses are not multiplied by the loss scale that the optimizer divides by",
        )


@observes
def end_step(parts: list[Any], ddps: list[Any]) -> None:
    """Forget what was asked for, for the next step."""
    for part in parts:
        _asked.pop(part, None)
        _asks_before[part] = max((_last_ask.get(ddp, 0) for ddp in ddps), default=0)
    _unscaled_losses.difference_update(ddps)


def _scale(optimizer: Any) -> float:
    """Return the loss scale; waits for the GPU."""
    return float(optimizer.grad_scaler.scale)


def _is_last_stage() -> bool:
    from megatron.core import parallel_state

    stages: int = parallel_state.get_pipeline_model_parallel_world_size()
    return bool(parallel_state.get_pipeline_model_parallel_rank() == stages - 1)


PATCH = Patch(
    name="audit.scales",
    doc=__doc__,
    upstream="https://github.com/NovaSky-AI/SkyRL/pull/1212",
    sites=(
        site(
            "megatron.core.optimizer.optimizer",
            {
                "MixedPrecisionOptimizer.get_loss_scale": watch_loss_scale,
                "MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan": watch_division,
            },
        ),
    ),
)
