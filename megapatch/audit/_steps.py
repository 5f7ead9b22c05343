"""learning-rate-moves, schedule-once; and the optimizer step, which all parts see begin and end.

Watches   step() of Megatron's optimizers, the layer-wise one from 0.16 on; and step() of
          OptimizerParamScheduler, which must not advance after a step that Megatron has skipped, as it does
          after an fp16 overflow, and advances once a step in most trainers. A load that moves it does not count.
          Of optimizers that contain others the outermost step counts.
Limits    a schedule that is not an OptimizerParamScheduler is not seen. Nor is one that never advances.
Cost      some microseconds a bucket in a step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from ..patch import Site
from ._audit import Audit, Part, Step
from ._findings import observes
from ._sites import site


class Steps(Part):
    name = "steps"
    doc = __doc__

    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._is_stepping = False
        self._skipped: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers whose last step was skipped, until their schedule advances."""
        self._advanced: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers whose schedule has advanced since their last step."""
        self._is_loading = False

    def sites(self) -> tuple[Site, ...]:
        steps = ("FP32Optimizer.step", "MixedPrecisionOptimizer.step", "ChainedOptimizer.step")
        return (
            site("megatron.core.optimizer.optimizer", dict.fromkeys(steps, self.watch_step)),
            site(
                "megatron.core.optimizer.layer_wise_optimizer",
                {"LayerWiseDistributedOptimizer.step": self.watch_step},
            ),
            site(
                "megatron.core.optimizer_param_scheduler",
                {
                    "OptimizerParamScheduler.step": self.watch_schedule,
                    "OptimizerParamScheduler.load_state_dict": self.watch_load,
                },
                expected={"OptimizerParamScheduler.step": ("increment",)},
            ),
        )

    # ------------------------------------------------------------------------ the optimizer's step
    def watch_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def patched_step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_stepping:
                return step(optimizer, *args, **kwargs)
            try:
                seen = self._begin(optimizer)
                result = self._take(step, optimizer, *args, **kwargs)
            except BaseException:
                self._fail(optimizer)
                raise
            if seen is not None:
                self._end(seen, result)
            return result

        return patched_step

    def _take(self, step: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._is_stepping = True
        try:
            return step(optimizer, *args, **kwargs)
        finally:
            self._is_stepping = False
            self.ledger.step += 1

    @observes
    def _begin(self, optimizer: Any) -> Step:
        step = Step(optimizer, self.audit.models.stepped_by(optimizer))
        for part in self.audit.parts:
            part.begin_step(step)
        return step

    @observes
    def _fail(self, optimizer: Any) -> None:
        """Have the gradients of a step that raised, perhaps the audit's own error, excused."""
        chunks = self.audit.models.stepped_by(optimizer)
        self.audit.events.may_have_broken = True
        for part in self.audit.parts:
            part.interrupted(chunks)

    @observes
    def _end(self, step: Step, result: tuple[Any, ...]) -> None:
        step.succeeded = bool(result[0])
        for part in self.audit.parts:
            part.end_step(step)
        self.audit.events.may_have_broken = False

    # ------------------------------------------------------------------------ the learning rate's schedule
    @observes
    def end_step(self, step: Step) -> None:
        (self._skipped.discard if step.succeeded else self._skipped.add)(step.optimizer)
        self._advanced.discard(step.optimizer)

    def watch_schedule(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def patched_step(schedule: Any, increment: Any, *args: Any, **kwargs: Any) -> Any:
            self._note_advance(schedule, increment)
            return step(schedule, increment, *args, **kwargs)

        return patched_step

    @observes
    def _note_advance(self, schedule: Any, increment: Any) -> None:
        if self._is_loading or not increment or type(schedule.optimizer).__hash__ is None:
            return  # the last is made up, by a diagnosis
        if schedule.optimizer in self._skipped:
            what = "the schedule advanced after a step that was skipped"
            self.ledger.report("learning-rate-moves", "after-skip", what)
        elif schedule.optimizer in self._advanced:
            what = "the schedule advanced twice after one optimizer step"
            self.ledger.report("schedule-once", "twice", what)
        self._skipped.discard(schedule.optimizer)
        self._advanced.add(schedule.optimizer)

    def watch_load(self, load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load_state_dict)
        def patched_load_state_dict(*args: Any, **kwargs: Any) -> Any:
            self._is_loading = True
            try:
                return load_state_dict(*args, **kwargs)
            finally:
                self._is_loading = False

        return patched_load_state_dict
