"""The optimizer step, which all parts see begin and end, and what the report has of steps, calls and models.

Watches   step() of Megatron's optimizers, the layer-wise one from 0.16 on. Of optimizers that contain others the
          outermost step counts. Calls and models are shown by the other parts.
Cost      some microseconds a bucket in a step.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from .._python.places import user_lines
from .._ranks import place
from ..patch import Site
from ._audit import Audit, Call, Part, Step
from ._findings import observes
from ._watching import RAISED, around, site

_APART = 60.0
"""Seconds from one report of a process to the next, if nothing is found meanwhile."""


class Steps(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._is_stepping = False
        self._left_report = 0.0

    def sites(self) -> tuple[Site, ...]:
        steps = ("FP32Optimizer.step", "MixedPrecisionOptimizer.step", "ChainedOptimizer.step")
        watch_step = around(self._begin, self._end)
        return (
            site("megatron.core.optimizer.optimizer", dict.fromkeys(steps, watch_step)),
            site(
                "megatron.core.optimizer.layer_wise_optimizer", {"LayerWiseDistributedOptimizer.step": watch_step}
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
        self.audit.may_have_broken = True
        for part in self.audit.parts:
            part.interrupted(chunks)

    @observes
    def _show_end(self, step: Step, result: tuple[Any, ...]) -> None:
        step.succeeded = bool(result[0])
        for part in self.audit.parts:
            part.end_step(step)
        self.audit.may_have_broken = False

    # ------------------------------------------------------------------------ for the report
    @observes
    def joined(self, chunk: Any) -> None:
        module = getattr(chunk, "module", None)
        count = sum(parameter.numel() for parameter in module.parameters()) if module is not None else 0
        self.ledger.happened("model", f"{count:,} parameters")

    @observes
    def begin_call(self, call: Call) -> None:
        """Remember where the call is made: in autograd's threads there is no code of the user."""
        self.ledger.during = user_lines()

    @observes
    def begin_step(self, step: Step) -> None:
        """Remember where the step is made, and by which rank: at the end of a process nobody may know it."""
        self.ledger.during = user_lines()
        if self.ledger.place is None:
            self.ledger.place = place()

    @observes
    def end_step(self, step: Step) -> None:
        """Leave a report after 1, 2, 4, 8 steps and so on, and now and then: a job that is killed, or ends in
        os._exit(), leaves none at its end."""
        now, count = time.monotonic(), self.ledger.step
        if count & (count - 1) == 0 or (self.audit.is_due() and now - self._left_report >= _APART):
            self._left_report = now
            self.ledger.changed()

    @observes
    def interrupted(self, chunks: list[Any]) -> None:
        error = sys.exc_info()[0]
        self.ledger.happened("exception", error.__name__ if error else "")
