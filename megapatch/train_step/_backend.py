"""The protocols between a step, the caller's optimizer and each kind of model, and the step's result.

There are two kinds of model: Megatron's DistributedDataParallel, and a module with FSDP2's fully_shard applied.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import MisuseError


class Optimizer(Protocol):
    """The part of an optimizer that a step calls: Megatron's and ``torch.optim.Optimizer`` have it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def zero_grad(self) -> None: ...

    def step(self) -> Any:
        """Return (succeeded, grad norm, number of zeros) with Megatron; with torch the result is ignored."""


class Scheduler(Protocol):
    """The part of a scheduler that a step calls: Megatron's OptimizerParamScheduler and torch's have it."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Called with ``increment=`` for Megatron, without arguments for torch."""


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
        normalizer: divisor of the gradient of the sum of all losses: microbatches (on this rank; with FSDP2 on all
            ranks), or tokens, or the caller's counts, over all ranks; 1 where calls add up.
    """

    succeeded: bool
    grad_norm: float | None
    num_zeros: int | None
    learning_rate: float
    weight_decay: float
    num_microbatches: int
    num_calls: int
    normalizer: float


def used_by_optimizer(optimizer: Optimizer) -> tuple[float, float]:
    """Return the largest learning rate and weight decay of all parameter groups. Call it before the scheduler."""
    rates, decays = (
        [float(group.get(name, 0.0)) for group in optimizer.param_groups] for name in ("lr", "weight_decay")
    )
    return max(rates, default=0.0), max(decays, default=0.0)


def check_normalizer(normalizer: float, unit: str) -> None:
    """Raise MisuseError unless the normalizer is above 0 and finite; all ranks have the same."""
    if not 0 < normalizer < math.inf:
        raise MisuseError(f"the sum of {unit} over all ranks is {normalizer:g}; expected a finite number above 0")


@dataclass(frozen=True)
class Options:
    """The options of `TrainStep`, whose docstring describes them."""

    expected_count: float | None
    expected_microbatches: int | None
    calls_add_up: bool
    step_scheduler_on_skip: bool
    max_grad_norm: float | None
    data_parallel_dims: tuple[str, ...] | None = None


class Backend(Protocol):
    """A step on one kind of model. Its methods need not repeat the checks of TrainStep."""

    chunks: list[Any]
    fewest_microbatches: int

    def forget(self) -> None:
        """Forget the step before, as far as it could still be dropped."""

    def begin(self) -> None: ...

    def accumulate(
        self, num_microbatches: int, count: float | None, last: bool
    ) -> contextlib.AbstractContextManager[Any]: ...

    def forward_backward(
        self, num_microbatches: int, *, forward_step_func: Callable[..., Any], data_iterator: Any, **arguments: Any
    ) -> Any: ...

    def set_aside(self) -> None: ...

    def take_up(self) -> None: ...

    def reduce(self) -> float: ...

    def finish(self, increment: int | None) -> StepResult: ...

    def abort(self) -> None: ...

    def abort_aside(self) -> None:
        """Drop a step that was set aside: the gradients in the model may be another's."""
