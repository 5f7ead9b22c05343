"""The optimizer step, where all that was watched since the last one is judged; learning-rate-moves.

Symptom   after an fp16 overflow, whose step Megatron skips, the caller advances the learning rate's schedule all
          the same.
Upstream  verl-project/verl#5369.
Seam      step() of Megatron's optimizers, and step() of OptimizerParamScheduler. Of optimizers that contain
          others the outermost step counts.
Limits    a schedule that is not an OptimizerParamScheduler is not seen.
Cost      some microseconds a bucket in a step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from ..patch import Patch
from . import _gathers, _gradients, _ranks, _scales, _tokens
from ._findings import LEDGER, observes
from ._optimizers import ddps_of, parts_of
from ._sites import site

_stepping: list[Any] = []
"""The optimizer whose step is under way."""
_skipped: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers whose last step was skipped, until their schedule advances."""


def watch_step(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def patched_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _stepping:
            return step(self, *args, **kwargs)
        try:
            due = _before_step(self)
            result = _take(step, self, *args, **kwargs)
        except BaseException:
            _after_failure(self)
            raise
        _after_step(self, result, due or [])
        return result

    return patched_step


def _take(step: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    _stepping.append(optimizer)
    try:
        return step(optimizer, *args, **kwargs)
    finally:
        _stepping.pop()
        LEDGER.step += 1


@observes
def _after_failure(optimizer: Any) -> None:
    """Expect the gradients of a step that raised, the audit's own error perhaps, to be dropped."""
    _gradients.excuse(ddps_of(optimizer))


@observes
def _before_step(optimizer: Any) -> list[Any] | None:
    """Judge what led to the step. Return the bucket groups that it leaves to be gathered."""
    parts, ddps = parts_of(optimizer), ddps_of(optimizer)
    _scales.begin_step(parts, ddps, bool(_gradients.judge(ddps)))
    _ranks.compare(ddps)
    return _gathers.begin_step(ddps)


@observes
def _after_step(optimizer: Any, result: tuple[Any, ...], due: list[Any]) -> None:
    succeeded, ddps = bool(result[0]), ddps_of(optimizer)
    _scales.end_step(parts_of(optimizer), ddps)
    _gradients.note_step(ddps)
    _tokens.end_step(ddps, succeeded)
    if _ranks.is_due():
        _tokens.judge()
    if succeeded:
        _skipped.discard(optimizer)
    else:
        _skipped.add(optimizer)
        _gathers.forget(due)


def watch_schedule(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def patched_step(self: Any, increment: Any, *args: Any, **kwargs: Any) -> Any:
        _note_advance(self, increment)
        return step(self, increment, *args, **kwargs)

    return patched_step


@observes
def _note_advance(schedule: Any, increment: Any) -> None:
    if increment and schedule.optimizer in _skipped:
        LEDGER.report("learning-rate-moves", "after-skip", "the schedule advanced after a step that was skipped")
    _skipped.discard(schedule.optimizer)


PATCH = Patch(
    name="audit.steps",
    doc=__doc__,
    upstream="https://github.com/verl-project/verl/issues/5369",
    sites=(
        site(
            "megatron.core.optimizer.optimizer",
            dict.fromkeys(
                ("FP32Optimizer.step", "MixedPrecisionOptimizer.step", "ChainedOptimizer.step"), watch_step
            ),
        ),
        site(
            "megatron.core.optimizer.layer_wise_optimizer",
            {"LayerWiseDistributedOptimizer.step": watch_step},
        ),
        site(
            "megatron.core.optimizer_param_scheduler",
            {"OptimizerParamScheduler.step": watch_schedule},
            expected={"OptimizerParamScheduler.step": ("increment",)},
        ),
    ),
)
