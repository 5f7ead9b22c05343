"""The optimizer step, which all parts see begin and end.

Watches   step() of Megatron's optimizers, the layer-wise one from 0.16 on. Of optimizers that contain others the
          outermost step counts.
Cost      some microseconds a bucket in a step.
"""

from __future__ import annotations

import functools
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

    def sites(self) -> tuple[Site, ...]:
        steps = ("FP32Optimizer.step", "MixedPrecisionOptimizer.step", "ChainedOptimizer.step")
        return (
            site("megatron.core.optimizer.optimizer", dict.fromkeys(steps, self.watch_step)),
            site(
                "megatron.core.optimizer.layer_wise_optimizer",
                {"LayerWiseDistributedOptimizer.step": self.watch_step},
            ),
        )

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
