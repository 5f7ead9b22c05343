"""A trainer of one rank, made from a TrainStep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..train_step import StepResult, TrainStep


class StepTrainer:
    """A `Trainer` on one rank. All ranks of a model have to make each call, with the same data.

    A subclass may do more: keep the losses, refresh log-probs, sync weights.

    Args:
        step: a `megapatch.TrainStep` of this rank's model and optimizer.
        arguments: turns the data of a prompt group, or a list of such data if a microbatch call takes several
            groups, into the arguments of `TrainStep.forward_backward` on this rank. It chooses the rank's part of
            the data (by data parallel rank; tensor and pipeline parallel ranks get the same part) and the number
            of microbatches.
        increment: passed to `TrainStep.finish`: samples of an optimizer step, over all ranks.
    """

    def __init__(
        self, step: TrainStep, arguments: Callable[[Any], Mapping[str, Any]], increment: int | None = None
    ) -> None:
        self.step, self.arguments, self.increment = step, arguments, increment

    def begin_train_step(self) -> None:
        """Begin an optimizer step."""
        self.step.begin()

    def train_microbatch(self, data: Any) -> None:
        """Run forward and backward of one microbatch call.

        Args:
            data: the prompt group, or a list of them, as it comes from the buffer; `arguments` gets it.
        """
        self.step.forward_backward(**self.arguments(data))

    def finish_train_step(self) -> StepResult | Mapping[str, Any]:
        """Step the optimizer.

        Returns:
            The result of `TrainStep.finish`; a subclass may return a mapping of metrics.
        """
        return self.step.finish(self.increment)

    def abort_train_step(self) -> None:
        """Drop the gradients of the open step, if any."""
        self.step.abort()
