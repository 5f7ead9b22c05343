"""The caller's optimizer and scheduler as a step needs them, and the step's result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class Optimizer(Protocol):
    """The part of Megatron's optimizers that a step calls."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def zero_grad(self) -> None: ...

    def step(self) -> Any:
        """Return (succeeded, grad norm, number of zeros)."""


class Scheduler(Protocol):
    """The part of Megatron's OptimizerParamScheduler that a step calls."""

    def step(self, increment: int) -> Any: ...


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step, the same on all ranks of a model.

    Attributes:
        succeeded: False when fp16 gradients overflowed: the parameters are unchanged, and so is the scheduler
            unless `step_scheduler_on_skip` is set.
        grad_norm: L2 norm of the whole model's gradient, before clipping; None where the optimizer does not
            compute it.
        num_zeros: number of zeros in the gradient; None where the optimizer does not count them.
        learning_rate: used by this step; the largest of the optimizer's parameter groups.
        weight_decay: used by this step; the largest of the optimizer's parameter groups.
        num_microbatches: on this rank.
        num_calls: forward-backward calls on this rank.
        normalizer: divisor of the gradient of the sum of all losses: microbatches on this rank, or tokens, or the
            caller's counts, over all ranks; 1 where calls add up.
    """

    succeeded: bool
    grad_norm: float | None
    num_zeros: int | None
    learning_rate: float
    weight_decay: float
    num_microbatches: int
    num_calls: int
    normalizer: float
