"""fresh-counts: the token counts of routers are zero as a step's first call begins.

Watches   calls that train, in the steps that are looked at closely, among them those after an exception, an abort,
          or gradients that were zeroed unused: the counts for the expert bias (from 0.12 on) and of the global
          auxiliary loss (from 0.15 on), which finalize_model_grads() zeroes.
Limits    a call is a step's first if no gradient has arrived since they were zeroed. Models that were wrapped
          before any audit began are not judged, nor is a model's first step.
Cost      a small operation a router in such a call; the result is read as the step ends.
"""

from __future__ import annotations

from typing import Any

from .._mcore.step_state import counts_in
from ._audit import Audit, Call, Part, Step
from ._buckets import ever_arrived, states_of
from ._findings import observes, user_code


class FreshCounts(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._seen: list[tuple[Any, tuple[str, ...]]] = []
        """In this step: whether any count was above zero, as a tensor, and the user's code then."""

    @observes
    def begin_call(self, call: Call) -> None:
        """Look at the counts, without waiting for them."""
        if not call.trains or not self.audit.looks():
            return
        states = [state for chunk in call.chunks for state in states_of(chunk)]
        is_under_way = any(state.arrivals and not state.stepped for state in states)
        if is_under_way or not ever_arrived(call.chunks):
            return
        counts = [count for chunk in call.chunks for count in counts_in(chunk)]
        if counts:
            import torch

            self.ledger.judged["fresh-counts"] += 1
            self._seen.append((torch.stack([count.any() for count in counts]).any(), user_code()))

    @observes
    def end_step(self, step: Step) -> None:
        """Report counts; Megatron's step has waited for the GPU by now."""
        seen, self._seen = self._seen, []
        for is_counted, where in seen:
            if is_counted:
                what = "routers begin a step with tokens that they have counted before it"
                self.ledger.report("fresh-counts", "call", what, where)

    @observes
    def forget(self) -> None:
        self._seen.clear()
