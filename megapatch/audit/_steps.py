"""The optimizer step, which all parts see begin and end.

Watches   step() of Megatron's optimizers, the layer-wise one from 0.16 on. Of optimizers that contain others the
          outermost step counts.
Cost      some microseconds a bucket in a step.
"""

from __future__ import annotations

from typing import Any

from ..patch import Site
from ._audit import Audit, Part, Step
from ._findings import observes
from ._watching import RAISED, around, site


class Steps(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._is_stepping = False

    def sites(self) -> tuple[Site, ...]:
        steps = ("FP32Optimizer.step", "MixedPrecisionOptimizer.step", "ChainedOptimizer.step")
        watch_step = around(self._begin, self._end)
        return (
            site("megatron.core.optimizer.optimizer", dict.fromkeys(steps, watch_step)),
            site(
                "megatron.core.optimizer.layer_wise_optimizer",
                {"LayerWiseDistributedOptimizer.step": watch_step},
            ),
        )

    def _begin(self, optimizer: Any, *_: Any, **__: Any) -> tuple[Step | None] | None:
        """Return the step in a tuple; None for one that another contains."""
        if self._is_stepping:
            return None
        try:
            begun = (self._show_beginning(optimizer),)
        except BaseException:
            self._fail(optimizer)
            raise
        self._is_stepping = True
        return begun

    def _end(self, begun: tuple[Step | None] | None, result: Any, optimizer: Any, *_: Any, **__: Any) -> None:
        if begun is None:
            return
        self._is_stepping = False
        self.ledger.step += 1
        if result is RAISED:
            self._fail(optimizer)
        elif begun[0] is not None:
            self._show_end(begun[0], result)

    @observes
    def _show_beginning(self, optimizer: Any) -> Step:
        step = Step(optimizer, self.audit.models.stepped_by(optimizer))
        for part in self.audit.parts:
            part.begin_step(step)
        return step

    @observes
    def _fail(self, optimizer: Any) -> None:
        """Have the gradients of a step that raised, perhaps the audit's own error, excused."""
        chunks = self.audit.models.stepped_by(optimizer)
        self.audit.counts.may_have_broken = True
        for part in self.audit.parts:
            part.interrupted(chunks)

    @observes
    def _show_end(self, step: Step, result: tuple[Any, ...]) -> None:
        step.succeeded = bool(result[0])
        for part in self.audit.parts:
            part.end_step(step)
        self.audit.counts.may_have_broken = False
