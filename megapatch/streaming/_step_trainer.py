"""A rank's trainer around a TrainStep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..train_step import StepResult, TrainStep


class StepTrainer:
    """The four calls of a `Trainer`, on one rank. All ranks of a model make each call, with the same data.

    step        a `megapatch.TrainStep` of this rank's model and optimizer
    arguments   turns a prompt group's data into the arguments of `TrainStep.forward_backward` on this rank: which
                part of it is the rank's (by data parallel rank; the same for tensor and pipeline parallel ones),
                and in how many microbatches
    increment   for `TrainStep.finish`: samples of an optimizer step, over all ranks

    A subclass may do more: keep the losses, refresh log-probs, sync weights.
    """

    def __init__(
        self, step: TrainStep, arguments: Callable[[Any], Mapping[str, Any]], increment: int | None = None
    ) -> None:
        self.step, self.arguments, self.increment = step, arguments, increment

    def begin_train_step(self) -> None:
        self.step.begin()

    def train_microbatch(self, data: Any) -> None:
        self.step.forward_backward(**self.arguments(data))

    def finish_train_step(self) -> StepResult | Mapping[str, Any]:
        return self.step.finish(self.increment)

    def abort_train_step(self) -> None:
        self.step.abort()
