"""every-chunk-steps: all chunks of a model are stepped.

Watches   calls and steps. When a training call begins, the chunks that the last call trained have all been
          stepped, or none has. A chunk that was never stepped, and lost its gradients, is reported once an
          optimizer has stepped zeros.
Limits    a model that is trained and never stepped is not reported while no optimizer steps.
Cost      about a microsecond a chunk and call.
"""

from __future__ import annotations

import weakref
from typing import Any

from ._audit import Audit, Call, Part, Step
from ._buckets import is_zero, states_of
from ._findings import describe, observes


class EveryChunkSteps(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        """Chunks that have had gradients since their last step."""
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        """Chunks that have had gradients, and were stepped."""
        self._passed_over: weakref.WeakSet[Any] = weakref.WeakSet()
        """Chunks before whose first step an optimizer has stepped others, which were never trained."""

    @observes
    def begin_call(self, call: Call) -> None:
        """Report chunks that were not stepped with the others."""
        if not call.trains:
            return
        self.ledger.judged["every-chunk-steps"] += 1
        left = [chunk for chunk in call.chunks if chunk in self._waiting]
        if left and any(chunk in self._stepped and chunk not in left for chunk in call.chunks):
            names = [pair for chunk in left for pair in chunk.module.named_parameters()]
            what = f"{describe([parameter for _, parameter in names], names)} had gradients and were not stepped"
            self.ledger.report("every-chunk-steps", "left", f"{what}, as other chunks of their model were")
        elif any(state.dropped for chunk in left if chunk in self._passed_over for state in states_of(chunk)):
            what = "the model had gradients that were dropped, and an optimizer has stepped what had none"
            self.ledger.report("every-chunk-steps", "model", what)

    @observes
    def end_call(self, call: Call) -> None:
        if call.trains and call.has_returned:
            self._waiting.update(chunk for chunk in call.chunks if getattr(chunk, "param_to_bucket_group", None))

    @observes
    def begin_step(self, step: Step) -> None:
        """Note chunks that wait while others are stepped that were never trained."""
        if step.has_gradients or any(chunk in self._waiting or chunk in self._stepped for chunk in step.chunks):
            return
        states = [state for chunk in step.chunks for state in states_of(chunk)]
        if states and all(map(is_zero, states)):  # else they were written by hand, or there are no buckets
            self._passed_over.update(self._waiting.difference(self._stepped))

    @observes
    def end_step(self, step: Step) -> None:
        self._stepped.update(chunk for chunk in step.chunks if chunk in self._waiting)
        self._waiting.difference_update(step.chunks)
        self._passed_over.difference_update(step.chunks)
