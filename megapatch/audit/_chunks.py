"""every-chunk-steps, averaged-alike: all chunks of a model are stepped, with the factors that they were made with.

Watches   calls and steps, as the other parts show them: as a call that trains begins, all of its chunks that the
          call before has trained were stepped since, or none. And `gradient_scaling_factor` of each bucket, from
          when DistributedDataParallel has made it to the step.
Limits    a model of one chunk that no optimizer steps is not reported. Factors of chunks that were wrapped before
          any audit began are taken as they are then.
Cost      about a microsecond a chunk and call, and a bucket and step.
"""

from __future__ import annotations

from typing import Any

from .._mcore.bucket_groups import bucket_groups
from ._audit import Audit, Call, Part, Step
from ._findings import describe, observes
from ._notes import Notes


class Chunks(Part):
    name = "chunks"
    doc = __doc__

    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._factors: Notes[float] = Notes("factor")
        """About a bucket."""
        self._was_stepped: Notes[bool] = Notes("stepped")
        """About a chunk that has been trained: whether an optimizer has stepped it since."""

    @observes
    def joined(self, chunk: Any) -> None:
        for group in bucket_groups(chunk):
            for bucket in group.buckets:
                self._factors.set(bucket, bucket.gradient_scaling_factor)

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
            for group in bucket_groups(chunk):
                for bucket in group.buckets:
                    made_with = self._factors.get(bucket, bucket.gradient_scaling_factor)
                    if bucket.gradient_scaling_factor != made_with:
                        name = describe(list(bucket.params), chunk.module.named_parameters())
                        factors = f"{bucket.gradient_scaling_factor:g}, and not by {made_with:g}"
                        what = f"the gradients of {name} are multiplied by {factors}"
                        self.ledger.report("averaged-alike", "changed", what)

    @observes
    def end_step(self, step: Step) -> None:
        for chunk in step.chunks:
            if self._was_stepped.get(chunk, None) is not None:
                self._was_stepped.set(chunk, True)
