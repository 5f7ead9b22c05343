"""every-chunk-steps, averaged-alike: all chunks of a model are stepped, with the factors that they were made with.

Watches   calls and steps, as the other parts show them: as a call that trains begins, all of its chunks that the
          call before has trained were stepped since, or none. And `gradient_scaling_factor` of each bucket, from
          when DistributedDataParallel has made it to the step.
Limits    a model of one chunk that no optimizer steps is not reported. Factors of chunks that were wrapped before
          any audit began are taken as they are then.
Cost      about a microsecond a chunk and call; one list of the buckets' factors a step.
"""

from __future__ import annotations

from typing import Any

from ._audit import Audit, Call, Part, Step
from ._buckets import states_of
from ._findings import describe, observes
from ._notes import Notes


class Chunks(Part):
    name = "chunks"
    doc = __doc__

    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._factors: Notes[list[float]] = Notes("factors")
        """About a chunk: of each bucket."""
        self._was_stepped: Notes[bool] = Notes("stepped")
        """About a chunk that has been trained: whether an optimizer has stepped it since."""

    @observes
    def joined(self, chunk: Any) -> None:
        self._factors.set(chunk, _factors_of(chunk))

    @observes
    def begin_call(self, call: Call) -> None:
        """Report chunks that were not stepped with the others."""
        if not call.trains:
            return
        trained = [chunk for chunk in call.chunks if self._was_stepped.get(chunk, None) is not None]
        left = [chunk for chunk in trained if not self._was_stepped.get(chunk, True)]
        if left and len(left) < len(trained):
            names = [pair for chunk in left for pair in chunk.module.named_parameters()]
            what = f"{describe([parameter for _, parameter in names], names)} had gradients and were not stepped"
            self.ledger.report("every-chunk-steps", "left", f"{what}, as other chunks of their model were")

    @observes
    def end_call(self, call: Call) -> None:
        for chunk in call.chunks if call.trains and call.has_returned else ():
            if getattr(chunk, "param_to_bucket_group", None):  # else nothing of it is trained
                self._was_stepped.set(chunk, False)

    @observes
    def begin_step(self, step: Step) -> None:
        """Note factors that were changed."""
        for chunk in step.chunks:
            factors = _factors_of(chunk)
            made_with = self._factors.get(chunk, factors)
            if factors != made_with:
                self._report_factors(chunk, factors, made_with)

    def _report_factors(self, chunk: Any, factors: list[float], made_with: list[float]) -> None:
        for state, factor, before in zip(states_of(chunk), factors, made_with, strict=True):
            if factor != before:
                name = describe(state.parameters, chunk.module.named_parameters())
                what = f"the gradients of {name} are multiplied by {factor:g}, and not by {before:g}"
                self.ledger.report("averaged-alike", "changed", what)

    @observes
    def end_step(self, step: Step) -> None:
        for chunk in step.chunks:
            if self._was_stepped.get(chunk, None) is not None:
                self._was_stepped.set(chunk, True)


def _factors_of(chunk: Any) -> list[float]:
    return [state.bucket.gradient_scaling_factor for state in states_of(chunk)]
