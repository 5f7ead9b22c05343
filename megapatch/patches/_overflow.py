"""Skip the step of an fp16 overflow, and train on: shared by the patches of three frameworks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

from .._python.dotted import temporarily_set
from .._version import see

OVERFLOW = (False, None, None)
"""The result of step() of Megatron's optimizers when they have found an overflow and not stepped."""

COUNT = "megapatch_skipped_steps"
"""Attribute of a framework's trainer: the optimizer steps that were skipped so far. Users read it by this name."""

log = logging.getLogger("megapatch")


@contextlib.contextmanager
def overflow_answered(trainer: Any, answer: tuple[Any, ...]) -> Iterator[list[Any]]:
    """Let the step() of the trainer's optimizer return `answer` where it found an overflow, and count these steps.

    Yields a list that gets each of them. Nothing is counted when the body raises.
    """
    step, overflows = trainer.optimizer.step, []

    def answered() -> Any:
        found = step()
        if tuple(found) != OVERFLOW:
            return found
        overflows.append(found)
        return answer

    with temporarily_set(trainer.optimizer, step=answered):
        yield overflows
    if overflows:
        count_overflow(trainer)


def leave_overflows_to_optimizer(chunks: Iterable[Any]) -> None:
    """Switch off the check of gradients for NaN, which raises before the optimizer can skip an overflow's step."""
    for chunk in chunks:
        if hasattr(chunk, "ddp_config"):
            chunk.ddp_config.check_for_nan_in_grad = False


def standing_still(scheduler: Any) -> contextlib.AbstractContextManager[None]:
    """Leave the learning rate where it is, whatever steps the scheduler is asked for meanwhile."""
    return temporarily_set(scheduler, step=lambda *ignored, **also_ignored: None)


def count_overflow(trainer: Any) -> None:
    """Count a skipped step in the trainer's COUNT, and log on rank 0 that it was, and the new loss scale."""
    import torch

    count = getattr(trainer, COUNT, 0) + 1
    setattr(trainer, COUNT, count)

    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return
    optimizer = trainer.optimizer
    scale = float(optimizer.get_loss_scale())
    if scale <= (getattr(optimizer.config, "min_loss_scale", None) or 0.0):
        log.error(
            "fp16 gradients overflow at the smallest loss scale, %g: the optimizer step was skipped, and so will "
            "be all others until gradients are finite (%d so far)" + see("smallest-loss-scale"),
            scale,
            count,
        )
    else:
        log.warning(
            "fp16 gradients overflowed: the optimizer step was skipped; the loss scale is now %g (%d so far)"
            + see("overflow"),
            scale,
            count,
        )
