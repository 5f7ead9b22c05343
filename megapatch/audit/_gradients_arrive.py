"""gradients-arrive: what is trained has gradients in every step, parameter by parameter.

Watches   the hooks that DistributedDataParallel gives to its parameters. As a step begins for which gradients have
          arrived, a parameter without one has either had gradients in earlier steps, which is noted at once, or
          never, which is noted in the steps in which ranks are compared.
Limits    experts, which have no gradient where they had no tokens, and models that were wrapped before any audit
          began. A process that has captured a CUDA graph is not judged: replays run no hook. A gradient that is
          zero has arrived.
Cost      looks once at each bucket in a step; goes through its parameters only where one has no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ._audit import Part, Step
from ._buckets import BucketState, states_of
from ._findings import describe, observes


class GradientsArrive(Part):
    @observes
    def begin_step(self, step: Step) -> None:
        """Note parameters without a gradient."""
        states = [state for chunk in step.chunks for state in states_of(chunk)]
        if self.ledger.has_captured or not any(state.arrivals for state in states):
            return
        unusual = [state for state in states if not (state.all_had and all(state.arrived))]
        lacking = [lacks for state in unusual for lacks in _without_gradient(state)]
        for state in unusual:
            state.note_had()
        stopped = [parameter for parameter, had in lacking if had]
        never = [parameter for parameter, had in lacking if not had] if self.audit.is_due() else []
        self._report("stopped", stopped, "had gradients in earlier steps, and none", step)
        self._report("never", never, "has never had a gradient, nor one", step)

    def _report(self, kind: str, parameters: list[Any], what: str, step: Step) -> None:
        if parameters:
            frozen = "" if any(each.requires_grad for each in parameters) else " (requires_grad is False now)"
            named = [pair for chunk in step.chunks for pair in chunk.module.named_parameters()]
            text = f"{describe(parameters, named)}{frozen} {what} in this step, in which others have"
            self.ledger.report("gradients-arrive", kind, text)


def _without_gradient(state: BucketState) -> Iterator[tuple[Any, bool]]:
    """Yield the parameters of a bucket without a gradient in this step, and whether they have had any before."""
    for parameter, has_arrived, had in zip(state.parameters, state.arrived, state.had, strict=True):
        if not has_arrived and getattr(parameter, "allreduce", True):
            yield parameter, had
