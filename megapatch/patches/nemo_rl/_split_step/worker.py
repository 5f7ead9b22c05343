"""The shared part of split train steps of all NeMo-RL workers, and the state of a worker's open step.

train_microbatch, finish_train_step and abort_train_step are those of NeMo-RL main, for workers that lack them.
Each kind of worker has a `SplitStep` of its own, which trains on the data of a call.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ....errors import MisuseError
from ....train_step import NLL, POLICY_GRADIENT, normalize_metrics
from .._workers import STATE, is_open

OUT_OF_BOUNDS = "is_oob_ratio"
"""A metric that releases do not report for a split step: in v0.6.0 it is one minus a mean, in v0.7.0 a mean."""


def train_microbatch(self: Any, data: Any) -> None:
    """Run forward and backward on part of the step's data, in any number of microbatches.

    An exception ends the step, with gradients zeroed; abort_train_step() after that does nothing.

    Args:
        data: as for train(), of this data-parallel rank.

    Raises:
        MisuseError: (a RuntimeError) no step is open, or the data does not fit the step.
    """
    split = open_split_of(self)
    with _aborting(self):
        split.train(self, data)


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
        step: the step of the worker's model, with `begin`, `abort` and others: a TrainStep, or an FSDP2Step.
        gbs: samples of the step, over all ranks.
        mbs: samples of a microbatch.
        expected_count: divisor of losses and metrics until the end: a power of two, so that no digit is lost, and
            not less than the step's tokens or sequences.
        sequences: those that count, on this rank, until now.
        tokens: those that count, on this rank, until now.
    """

    step: Any
    loss_fn: Any
    gbs: int
    mbs: int
    expected_count: float
    sequences: float = 0.0
    tokens: float = 0.0

    def abort(self, worker: Any) -> None:
        self.step.abort()

    def count_of(self, sequences: float, tokens: float) -> float:
        """Return whichever of the two the loss is divided by."""
        return tokens if by_tokens(self.loss_fn) else sequences


def begin(
    kind: type[SplitStep],
    worker: Any,
    loss_fn: Any,
    gbs: int | None,
    mbs: int | None,
    make_step: Callable[[float], Any],
) -> None:
    """Open a step of this kind on the worker. `make_step` gets the step's expected count."""
    if is_open(worker):
        raise MisuseError("a train step is already open; call finish_train_step() or abort_train_step() first")
    if getattr(loss_fn, "positive_example_nll_weight", 0) > 0:
        raise MisuseError(
            "begin_train_step(): the loss has a positive_example_nll_weight, whose part is divided by each "
            "microbatch's own tokens; a split step would get it wrong. Use train()"
        )
    gbs, mbs = gbs or worker.cfg["train_global_batch_size"], mbs or worker.cfg["train_micro_batch_size"]
    expected_count = 2.0 ** math.ceil(math.log2(gbs * worker.cfg["max_total_sequence_length"]))
    step = make_step(expected_count)
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


# ---------------------------------------------------------------------------- metrics of losses
# They were computed before the totals of the step were known, and are corrected at its end.
def normalized(
    loss_fn: Any, metrics: Mapping[str, Any], *, expected_count: float, tokens: float, sequences: float
) -> dict[str, Any]:
    """Return a microbatch's metrics as train() has them, but for OUT_OF_BOUNDS.

    Args:
        expected_count: divisor of losses and metrics until now, in place of tokens and of sequences.
        tokens: those of the step that count, over all data-parallel ranks.
        sequences: those of the step that count, over all data-parallel ranks.
    """
    return normalize_metrics(
        {name: value for name, value in metrics.items() if is_reported(loss_fn, name)},
        tokens=(tokens or 1.0) / expected_count,
        sequences=(sequences or 1.0) / expected_count,
        loss="tokens" if by_tokens(loss_fn) else "sequences",
        kinds=kinds_of(loss_fn),
    )


def is_reported(loss_fn: Any, name: str) -> bool:
    return name != OUT_OF_BOUNDS or name in kinds_of(loss_fn)


def by_tokens(loss_fn: Any) -> bool:
    """Return whether the loss is divided by tokens, and not by sequences."""
    return getattr(getattr(loss_fn, "loss_type", None), "name", "TOKEN_LEVEL") == "TOKEN_LEVEL"


def kinds_of(loss_fn: Any) -> dict[str, str]:
    """Return the divisor of each metric, as NeMo-RL main's losses declare; before that, names decide."""
    declared = getattr(loss_fn, "metric_normalizations", None)
    if isinstance(declared, dict):
        return {name: kind.name.lower() for name, kind in declared.items()}
    kinds = {**NLL, **POLICY_GRADIENT}
    del kinds[OUT_OF_BOUNDS]
    if getattr(loss_fn, "sequence_level_importance_ratios", False):
        kinds["sampling_importance_ratio"] = "sequences"
    return kinds


# ---------------------------------------------------------------------------- workers of the data plane
# The entry points have the names of NeMo-RL main.
def begin_train_step_presharded(self: Any, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
    self.begin_train_step(loss_fn=loss_fn, gbs=gbs, mbs=mbs)


def train_microbatch_presharded(self: Any, meta: Any) -> None:
    """Fetch this data-parallel rank's samples and train on them."""
    self.train_microbatch(data=self._attach_or_repack_pack_metadata(self._fetch(meta), meta))


def finish_train_step_presharded(self: Any) -> dict[str, Any]:
    """Return the result of finish_train_step(), and whether this worker is the one that speaks for its twins."""
    result: dict[str, Any] = self.finish_train_step()
    return {**result, "is_replica_leader": bool(self._is_replica_leader())}


def abort_train_step_presharded(self: Any) -> None:
    self.abort_train_step()
