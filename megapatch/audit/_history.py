"""The rest of the report: models and exceptions on its timeline, and the line of the latest call.

Watches   calls, steps and models as the other parts show them. Loads, saves, offloads and weight syncs are put on
          the timeline by the parts that watch them.
Cost      some microseconds a call and a step.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from .._places import user_lines
from .._ranks import place
from ._audit import Audit, Call, Part, Step
from ._findings import observes

_APART = 60.0
"""Seconds from one report of a process to the next, if nothing is found meanwhile."""


class History(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._left = 0.0

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
        """Leave a report after the first step, and now and then: a job that is killed leaves none at its end."""
        now = time.monotonic()
        if self.ledger.step == 1 or (self.audit.is_due() and now - self._left >= _APART):
            self._left = now
            self.ledger.changed()

    @observes
    def interrupted(self, chunks: list[Any]) -> None:
        error = sys.exc_info()[0]
        self.ledger.happened("exception", error.__name__ if error else "")
