"""The split train step of NeMo-RL's DTensor workers.

The worker's own train() does all of it. It trains on the data of each call with an optimizer that does nothing and
a loss whose backward() is the step's. At the end it is called without any data, for its work after the last
microbatch. So a split step packs, normalizes, clips and reports as that release's train() does, in either worker.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...._python.dotted import temporarily_set
from ....errors import MisuseError
from .._workers import STATE
from .fsdp2 import FSDP2Step
from .worker import SplitStep, begin, is_reported, normalized, sum_over_ranks, valid_counts


def begin_train_step(self: Any, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
    """Open a step, as that of the Megatron worker, of which it takes the arguments.

    Raises:
        MisuseError: (a RuntimeError) a step is already open, a split step cannot normalize the loss, or the model
            is expert parallel.
    """
    if getattr(self, "moe_mesh", None) is not None:
        raise MisuseError("begin_train_step(): a split step cannot train an expert parallel model. Use train()")
    begin(DTensorSplitStep, self, loss_fn, gbs, mbs, lambda expected_count: FSDP2Step(self))


@dataclass
class DTensorSplitStep(SplitStep):
    loss: Any = 0.0
    metrics: dict[str, list[Any]] = field(default_factory=dict)
    empty_batch: Any = None

    def train(self, worker: Any, data: Any) -> None:
        sequences, tokens = valid_counts(data)
        bins = _bins(worker, data)
        num_microbatches = math.ceil(data.size / self.mbs) if bins is None else len(bins)
        with self.step.accumulate(num_microbatches) as backward:
            whole = _padded(data, bins, self.mbs, backward.passes) if data.size else data
            size, empty = sum_over_ranks(worker.dp_mesh.get_group(), whole.size, not data.size)
            if empty:
                raise MisuseError(
                    "train_microbatch(): a rank has no samples in this call; give it some with a sample_mask of "
                    "0, so that it takes part in the gathers and reduces of the others"
                )
            loss_fn = SplitLoss(self.loss_fn, self.expected_count, backward)
            with _replaced(
                worker,
                optimizer=IdleOptimizer(worker.optimizer),
                scheduler=IdleOptimizer(),
                max_grad_norm=None,
                _update_moe_gate_bias_if_supported=lambda: None,
                **{STATE: None},  # else the guard of an open step would refuse train()
            ):
                result = worker.train(whole, loss_fn, gbs=int(size), mbs=self.mbs)
        self.sequences += sequences
        self.tokens += tokens
        self.loss = self.loss + result["global_loss"]
        for name, values in result["all_mb_metrics"].items():
            self.metrics.setdefault(name, []).extend(values)
        self.empty_batch = self.empty_batch or _empty_batch(whole)

    def finish(self, worker: Any) -> dict[str, Any]:
        if self.empty_batch is None:
            raise MisuseError("finish_train_step(): the step had no train_microbatch()")
        sequences, tokens = sum_over_ranks(worker.dp_mesh.get_group(), self.sequences, self.tokens)
        count = self.count_of(sequences, tokens)
        if count:
            self.step.end(self.expected_count / count)
        else:
            self.step.abort()
        optimizer = OptimizerStepOnly(worker.optimizer, expects_gradients=count > 0)
        with _replaced(worker, optimizer=optimizer, **{STATE: None}):
            result: dict[str, Any] = worker.train(self.empty_batch, self.loss_fn, gbs=worker.dp_size, mbs=self.mbs)
        if not optimizer.stepped:
            raise MisuseError("finish_train_step(): train() without data did not step the optimizer")
        result["global_loss"] = self.loss * (self.expected_count / (count or 1.0))
        result["all_mb_metrics"] = self._corrected(tokens, sequences)
        return result

    def _corrected(self, tokens: float, sequences: float) -> dict[str, list[Any]]:
        """Return the metrics, by microbatch, as train() has them."""
        totals = {"global_valid_seqs": sequences, "global_valid_toks": tokens}
        divided_by = {"expected_count": self.expected_count, "tokens": tokens, "sequences": sequences}
        found: dict[str, list[Any]] = {}
        for name, values in self.metrics.items():
            if name == "lr":
                found[name] = values
            elif name in totals:
                found[name] = [totals[name]] * len(values)
            elif is_reported(self.loss_fn, name):
                found[name] = [normalized(self.loss_fn, {name: value}, **divided_by)[name] for value in values]
        return found


# ---------------------------------------------------------------------------- arguments of train()
class IdleOptimizer:
    """Takes the place of the optimizer and the scheduler while train() has the data of a call; does nothing."""

    def __init__(self, optimizer: Any = None) -> None:
        self.param_groups = getattr(optimizer, "param_groups", None)

    def zero_grad(self, *ignored: Any, **also_ignored: Any) -> None:
        pass

    def step(self, *ignored: Any, **also_ignored: Any) -> None:
        pass


class OptimizerStepOnly:
    """The optimizer of a train() without data. It steps on the gradients that are already there."""

    def __init__(self, optimizer: Any, expects_gradients: bool) -> None:
        self.optimizer, self.expects_gradients = optimizer, expects_gradients
        self.param_groups = optimizer.param_groups
        self.stepped = False

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self.stepped:
            self.optimizer.zero_grad(*args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        if self.expects_gradients and all(parameter.grad is None for parameter in parameters):
            raise MisuseError("finish_train_step(): train() dropped the gradients before the optimizer's step")
        self.stepped = True
        return self.optimizer.step(*args, **kwargs)


class SplitLoss:
    """A loss function that divides by `expected_count`, and whose losses go backward by the step's `backward`.

    By then train() has multiplied them by the number of ranks, as FSDP2 takes the mean over those.
    """

    def __init__(self, loss_fn: Any, expected_count: float, backward: Callable[[Any], None]) -> None:
        tensor = sys.modules["torch"].Tensor

        def go_backward(loss: Any) -> None:
            backward(loss.as_subclass(tensor))

        self.loss_fn, self.expected_count = loss_fn, expected_count
        self.kind = type("Loss", (tensor,), {"backward": go_backward})  # sums and products have this type, too

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss_fn, name)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        for name in ("global_valid_seqs", "global_valid_toks"):
            kwargs[name] = kwargs[name].new_full((), self.expected_count)
        loss, metrics = self.loss_fn(*args, **kwargs)
        return loss.as_subclass(self.kind), metrics


def _replaced(worker: Any, **attributes: Any) -> contextlib.AbstractContextManager[None]:
    """Replace those of the attributes that the worker has, for now."""
    if hasattr(worker, "timer"):  # after v0.7.0; an exception would leave it running
        attributes["timer"] = type(worker.timer)()
    return temporarily_set(worker, **{name: value for name, value in attributes.items() if hasattr(worker, name)})


# ---------------------------------------------------------------------------- the data of a call
def _bins(worker: Any, data: Any) -> list[Any] | None:
    """Return the microbatches of packed or dynamically batched samples, None if all have the same size."""
    if not worker.cfg["dynamic_batching"]["enabled"] and not worker.enable_seq_packing:
        return None
    if data.micro_batch_indices is None or len(data.micro_batch_indices) != 1:
        raise MisuseError(
            "train_microbatch(): with dynamic batching or sequence packing expected what shard_by_batch_size() "
            "makes for one step, with its micro_batch_indices"
        )
    bins: list[Any] = data.micro_batch_indices[0]
    return bins


def _padded(data: Any, bins: list[Any] | None, mbs: int, passes: int) -> Any:
    """Repeat samples until there is a microbatch for each pass. The repeated samples do not count."""
    if bins is None:
        return _with_repeats(data, [0] * (passes * mbs - data.size))
    start, end = bins[0]
    missing = passes - len(bins)
    whole = _with_repeats(data, [*range(start, end)] * missing)
    size = end - start
    added = [[data.size + size * index, data.size + size * (index + 1)] for index in range(missing)]
    lengths = data.micro_batch_lengths[0]
    whole.micro_batch_indices = [[*bins, *added]]
    whole.micro_batch_lengths = [[*lengths, *lengths[:1] * missing]]
    whole.elem_counts_per_gb = [whole.size]
    return whole


def _with_repeats(data: Any, rows: list[int]) -> Any:
    if not rows:
        return data.slice(0, data.size)
    more = data.select_indices(rows)
    more["sample_mask"] = more["sample_mask"] * 0
    return type(data).from_batches([data, more])


def _empty_batch(data: Any) -> Any:
    """Return a batch without a microbatch. It still has a row, or train() would find no batch."""
    names = ("input_ids", "sample_mask", "token_mask")
    found = type(data)({name: data[name][:1] for name in names if name in data})
    found.micro_batch_indices, found.micro_batch_lengths, found.elem_counts_per_gb = [[]], [[0]], [0]
    return found
