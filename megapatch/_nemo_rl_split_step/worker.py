"""The shared part of split train steps of all NeMo-RL workers, and the state of a worker's open step.

train_microbatch, finish_train_step and abort_train_step are those of NeMo-RL main, for workers that lack them.
Each kind of worker has a `SplitStep` of its own, which trains on the data of a call.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import MisuseError
from ..patches.nemo_rl._workers import STATE, is_open
from ..train_step import NLL, POLICY_GRADIENT, normalize_metrics

OUT_OF_BOUNDS = "is_oob_ratio"


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
    """Return a microbatch's metrics as train() has them.

    Args:
        expected_count: divisor of losses and metrics until now, in place of tokens and of sequences.
        tokens: those of the step that count, over all data-parallel ranks.
        sequences: those of the step that count, over all data-parallel ranks.
    """
    divided = functools.partial(
        normalize_metrics,
        tokens=(tokens or 1.0) / expected_count,
        sequences=(sequences or 1.0) / expected_count,
        loss="tokens" if by_tokens(loss_fn) else "sequences",
        kinds=kinds_of(loss_fn),
    )
    found = divided(metrics)
    kind: type = type(loss_fn)
    if OUT_OF_BOUNDS in metrics and _is_one_minus_mean(kind):
        # 1 for each sequence whose metric was computed separately (without packing, 1 for all), minus a mean that
        # is below 1 as long as `expected_count` is more than all tokens.
        value = metrics[OUT_OF_BOUNDS]
        ones = math.ceil(value)
        found[OUT_OF_BOUNDS] = ones - divided({OUT_OF_BOUNDS: ones - value})[OUT_OF_BOUNDS]
    return found


def by_tokens(loss_fn: Any) -> bool:
    """Return whether the loss is divided by tokens, and not by sequences."""
    return getattr(getattr(loss_fn, "loss_type", None), "name", "TOKEN_LEVEL") == "TOKEN_LEVEL"


def kinds_of(loss_fn: Any) -> dict[str, str]:
    """Return the divisor of each metric, as NeMo-RL main's losses declare; before that, names decide."""
    declared = getattr(loss_fn, "metric_normalizations", None)
    if isinstance(declared, dict):
        return {name: kind.name.lower() for name, kind in declared.items()}
    kinds = {**NLL, **POLICY_GRADIENT}
    if getattr(loss_fn, "sequence_level_importance_ratios", False):
        kinds["sampling_importance_ratio"] = "sequences"
    if getattr(loss_fn, "truncated_importance_sampling_type", None) == "seq-mask-tis":
        kinds[OUT_OF_BOUNDS] = "sequences"
    return kinds


@functools.cache  # called for each microbatch
def _is_one_minus_mean(kind: type) -> bool:
    """Return whether is_oob_ratio is 1 minus a mean of those in bounds, as in v0.6.0; later it is a mean."""
    try:
        source = inspect.getsource(kind.__call__)
    except (OSError, TypeError, AttributeError):
        return False
    return re.search(rf'"{OUT_OF_BOUNDS}":\s*1(\.0)?\s*-', source) is not None


# ---------------------------------------------------------------------------- workers of the data plane
# The entry points have the names of NeMo-RL main.
def begin_train_step_presharded(self: Any, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
    self.begin_train_step(loss_fn=loss_fn, gbs=gbs, mbs=mbs)


def train_microbatch_presharded(self: Any, meta: Any, last: bool = False) -> None:
    """Fetch this data-parallel rank's samples and train on them."""
    data = self._attach_or_repack_pack_metadata(self._fetch(meta), meta)
    self.train_microbatch(data=data, **({"last": True} if last else {}))  # NeMo-RL's own does not take it


def finish_train_step_presharded(self: Any) -> dict[str, Any]:
    """Return the result of finish_train_step(), and whether this worker is the one that speaks for its twins."""
    result: dict[str, Any] = self.finish_train_step()
    return {**result, "is_replica_leader": bool(self._is_replica_leader())}


def abort_train_step_presharded(self: Any) -> None:
    self.abort_train_step()
