"""gradients-arrive: what is trained has gradients in every step, parameter by parameter.

Watches   the hooks that DistributedDataParallel gives to its parameters. As a step begins for which gradients have
          arrived, a parameter without one has either had gradients in earlier steps, which is noted at once, or
          never, which is noted in the steps in which ranks are compared.
Limits    experts, which have no gradient where they had no tokens, and models that were wrapped before any audit
          began. A process that has captured a CUDA graph is not judged: replays run no hook. A gradient that is
          zero has arrived.
Cost      compares two numbers a bucket and step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .._mcore.bucket_groups import bucket_groups
from ._audit import Audit, Part, Step
from ._buckets import state_of
from ._findings import describe, observes
from ._notes import Notes


class Arrivals(Part):
    name = "arrivals"
    doc = __doc__

    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._had: Notes[set[int]] = Notes("had")
        """About a bucket: the ids of the parameters that have had a gradient in any step."""

    @observes
    def begin_step(self, step: Step) -> None:
        """Note parameters without a gradient."""
        buckets = [bucket for chunk in step.chunks for group in bucket_groups(chunk) for bucket in group.buckets]
        if self.ledger.has_captured or not any(state_of(bucket).arrived for bucket in buckets):
            return
        lacking = [parameter for bucket in buckets for parameter in self._without_gradient(bucket)]
        named = [pair for chunk in step.chunks if lacking for pair in chunk.module.named_parameters()]
        for kind, had_some, what in (
            ("stopped", True, "had gradients in earlier steps, and none"),
            ("never", False, "has never had a gradient, nor one"),
        ):
            found = [parameter for parameter, had in lacking if had == had_some]
            if found and (had_some or self.audit.is_due()):
                frozen = " (requires_grad is False now)" if not any(each.requires_grad for each in found) else ""
                text = f"{describe(found, named)}{frozen} {what} in this step, in which others have"
                self.ledger.report("gradients-arrive", kind, text)

    def _without_gradient(self, bucket: Any) -> Iterator[tuple[Any, bool]]:
        """Yield the parameters that have no gradient in this step, and whether they have had any before."""
        arrived, had = state_of(bucket).arrived, self._had.get_or_make(bucket, set)
        if len(arrived) < len(bucket.params):
            for parameter in bucket.params:
                if id(parameter) not in arrived and getattr(parameter, "allreduce", True):
                    yield parameter, id(parameter) in had
        if len(had) < len(bucket.params):
            had |= arrived
