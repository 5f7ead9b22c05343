"""What a step asks of one kind of model, and what it returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import MisuseError


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step came to, the same on all ranks of a model.

    succeeded         False when fp16 gradients overflowed: parameters, and the scheduler, are where they were
    grad_norm         of the whole model, before clipping; None where the optimizer does not work it out
    num_zeros         in the gradient; None where the optimizer does not count them
    learning_rate, weight_decay   that this step used; the largest of the optimizer's parameter groups
    num_microbatches, num_calls   on this rank
    normalizer        what the gradient of the sum of all losses was divided by: microbatches (on this rank; with
                      FSDP2 on all), or tokens or whatever the caller counts, over all ranks; 1 where calls add up
    """

    succeeded: bool
    grad_norm: float | None
    num_zeros: int | None
    learning_rate: float
    weight_decay: float
    num_microbatches: int
    num_calls: int
    normalizer: float


def used_by_optimizer(optimizer: Any) -> tuple[float, float]:
    """Learning rate and weight decay, before the scheduler moves on; the largest of all parameter groups."""
    rates, decays = (
        [float(group.get(name, 0.0)) for group in optimizer.param_groups] for name in ("lr", "weight_decay")
    )
    return max(rates, default=0.0), max(decays, default=0.0)


def check_normalizer(normalizer: float, what: str) -> None:
    if not normalizer > 0:
        raise MisuseError(f"the sum of {what} over all ranks is {normalizer:g}; expected more than 0")


@dataclass(frozen=True)
class Options:
    """What `TrainStep` was given besides model, optimizer and scheduler; its docstring tells them."""

    expected_count: float | None
    expected_microbatches: int | None
    calls_add_up: bool
    step_scheduler_on_skip: bool
    max_grad_norm: float | None


class Backend(Protocol):
    """What a step does with one kind of model. No call has to check what TrainStep has checked."""

    chunks: list[Any]
    fewest_microbatches: int

    def begin(self) -> None: ...

    def accumulate(self, num_microbatches: int, count: float | None) -> contextlib.AbstractContextManager[Any]: ...

    def forward_backward(
        self, num_microbatches: int, *, forward_step_func: Callable[..., Any], data_iterator: Any, **arguments: Any
    ) -> Any: ...

    def reduce(self) -> float: ...

    def finish(self, increment: int | None) -> StepResult: ...

    def abort(self) -> None: ...
