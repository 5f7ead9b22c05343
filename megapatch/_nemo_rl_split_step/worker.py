"""The shared part of split train steps of all NeMo-RL workers, and the state of a worker's open step.

train_microbatch, finish_train_step and abort_train_step are those of NeMo-RL main, for workers that lack them.
Each kind of worker has a `SplitStep` of its own, which trains on the data of a call.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import MisuseError
from ..patches.nemo_rl._workers import STATE, is_open
from ..train_step import TrainStep
from .loss_metrics import by_tokens


def train_microbatch(self: Any, data: Any, last: bool = False) -> None:
    """Run forward and backward on part of the step's data, in any number of microbatches.

    An exception ends the step, with gradients zeroed; abort_train_step() after that does nothing.

    Args:
        data: as for train(), of this data-parallel rank.
        last: whether these are the step's last data, on all ranks alike. With overlap_grad_reduce the reduce then
            overlaps with the backward passes, from the second such step on; without this it waits for
            finish_train_step(). NeMo-RL's own methods do not have it. No effect on DTensor workers.

    Raises:
        MisuseError: (a RuntimeError) no step is open, its last data came, or the data does not fit the step.
    """
    split = open_split_of(self)
    with _aborting(self):
        split.train(self, data, last)


def finish_train_step(self: Any) -> dict[str, Any]:
    """Reduce the gradient, and step the optimizer and the scheduler.

    Returns:
        The result that train() would return for the data of all calls in one batch.

    Raises:
        MisuseError: (a RuntimeError) no step is open.
    """
    split = open_split_of(self)
    with _aborting(self):
        result: dict[str, Any] = split.finish(self)
    setattr(self, STATE, None)
    return result


def abort_train_step(self: Any) -> None:
    """Drop the open step and zero the gradients. Does nothing if no step is open."""
    if is_open(self):
        split = open_split_of(self)
        setattr(self, STATE, None)
        split.abort(self)


@dataclass
class SplitStep:
    """The state of a worker's open step.

    Attributes:
        gbs: samples of the step, over all ranks.
        mbs: samples of a microbatch.
        expected_count: divisor of losses and metrics until the end: a power of two, so that no digit is lost, and
            not less than the step's tokens or sequences.
        sequences: those that count, on this rank, until now.
        tokens: those that count, on this rank, until now.
    """

    step: TrainStep
    loss_fn: Any
    gbs: int
    mbs: int
    expected_count: float
    sequences: float = 0.0
    tokens: float = 0.0

    def train(self, worker: Any, data: Any, last: bool) -> None:
        raise NotImplementedError

    def finish(self, worker: Any) -> dict[str, Any]:
        raise NotImplementedError

    def abort(self, worker: Any) -> None:
        self.step.abort()

    def count_of(self, sequences: float, tokens: float) -> float:
        """Return whichever of the two the loss is divided by."""
        return tokens if by_tokens(self.loss_fn) else sequences


def begin(
    kind: type[SplitStep],
    worker: Any,
    scheduler: Any,
    loss_fn: Any,
    gbs: int | None,
    mbs: int | None,
    **options: Any,
) -> None:
    """Open a step of this kind on the worker. `options` are passed on to TrainStep."""
    if is_open(worker):
        raise MisuseError("a train step is already open; call finish_train_step() or abort_train_step() first")
    if getattr(loss_fn, "positive_example_nll_weight", 0) > 0:
        raise MisuseError(
            "begin_train_step(): the loss has a positive_example_nll_weight, whose part is divided by each "
            "microbatch's own tokens; a split step would get it wrong. Use train()"
        )
    gbs, mbs = gbs or worker.cfg["train_global_batch_size"], mbs or worker.cfg["train_micro_batch_size"]
    expected_count = 2.0 ** math.ceil(math.log2(gbs * worker.cfg["max_total_sequence_length"]))
    step = TrainStep(worker.model, worker.optimizer, scheduler, expected_count=expected_count, **options)
    step.begin()
    setattr(worker, STATE, kind(step, loss_fn, gbs, mbs, expected_count))


def open_split_of(worker: Any) -> Any:
    """Return the open SplitStep of a worker."""
    if not is_open(worker):
        raise MisuseError("no train step open; begin_train_step must be called first")
    return getattr(worker, STATE)


def valid_counts(data: Any) -> tuple[float, float]:
    """Return the sequences and tokens of `data` that count, as NeMo-RL's process_global_batch() counts them."""
    if "sample_mask" not in data:
        raise MisuseError("train_microbatch(): the data has no sample_mask")
    valid = data["sample_mask"]
    sequences = float(valid.sum())
    if "token_mask" in data:
        return sequences, float((data["token_mask"][:, 1:] * valid.unsqueeze(-1)).sum())
    return sequences, sequences * data["input_ids"].shape[1]


def sum_over_ranks(group: Any, *values: float) -> list[float]:
    """Return the sum of each value over the ranks of a group."""
    torch = sys.modules["torch"]
    found = torch.tensor([float(value) for value in values], dtype=torch.float64, device="cuda")
    torch.distributed.all_reduce(found, group=group)
    return list(found.tolist())


@contextlib.contextmanager
def _aborting(worker: Any) -> Iterator[None]:
    try:
        yield
    except BaseException:
        abort_train_step(worker)
        raise
