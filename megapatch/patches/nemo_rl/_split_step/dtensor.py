"""A step in slices of NeMo-RL's DTensor workers.

The worker's own train() does all of it: a slice, with an optimizer that keeps still and a loss whose backward()
is the step's; and at the end what comes after the last microbatch, with no data at all. So a step in slices packs,
normalizes, clips and reports as that release's train() does, in either worker.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ....errors import MisuseError
from ..._temporarily import temporarily_set
from .._workers import STATE
from .loss_metrics import normalized
from .worker import SplitStep, begin, counts, over_ranks


def begin_train_step(self: Any, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
    """Open a step: gradients are zeroed, and each train_microbatch() adds to them until finish_train_step().

    gbs, mbs: samples of the step over all ranks, and of a microbatch; by default the worker's settings.
    Raises MisuseError (a RuntimeError) when a step is open already, for losses that a step in slices cannot
    normalize, and with tensor parallelism.
    """
    begin(DTensorSplitStep, self, None, loss_fn, gbs, mbs)


@dataclass
class DTensorSplitStep(SplitStep):
    loss: Any = 0.0
    metrics: dict[str, list[Any]] = field(default_factory=dict)
    nothing: Any = None

    def train(self, worker: Any, data: Any) -> None:
        sequences, tokens = counts(data)
        count = self.count_of(sequences, tokens)
        bins = _bins(worker, data)
        num_microbatches = math.ceil(data.size / self.mbs) if bins is None else len(bins)
        # Ranks that share samples, for context parallelism, count a part each.
        with self.step.accumulate(num_microbatches, count / worker.cp_size) as backward:
            whole = _filled_up(data, bins, self.mbs, backward.passes) if data.size else data
            size, empty = over_ranks(worker.dp_mesh.get_group(), whole.size, not data.size)
            if empty:
                raise MisuseError(
                    "train_microbatch(): a rank has no sample in this slice; give it some with a sample_mask of "
                    "0, for it has to take part in the others' gathers and reduces"
                )
            losses = Losses(self.loss_fn, self.about, backward, worker.dp_size * worker.cp_size)
            with _with(
                worker,
                optimizer=Still(worker.optimizer),
                scheduler=Still(),
                max_grad_norm=None,
                moe_mesh=None,
                _update_moe_gate_bias_if_supported=lambda: None,
                **{STATE: None},  # it may train, for us
            ):
                told = worker.train(whole, losses, gbs=int(size), mbs=self.mbs)
        self.sequences += sequences
        self.tokens += tokens
        self.loss = self.loss + told["global_loss"]
        for name, values in told["all_mb_metrics"].items():
            self.metrics.setdefault(name, []).extend(values)
        self.nothing = self.nothing or _nothing(whole)

    def finish(self, worker: Any) -> dict[str, Any]:
        if self.nothing is None:
            raise MisuseError("finish_train_step(): the step had no train_microbatch()")
        sequences, tokens = over_ranks(worker.dp_mesh.get_group(), self.sequences, self.tokens)
        count = self.count_of(sequences, tokens)
        if count:
            self.step.reduce()
        else:
            self.step.abort()
        optimizer = Ready(worker.optimizer, expects_gradients=count > 0)
        with _with(worker, optimizer=optimizer, **{STATE: None}):
            told: dict[str, Any] = worker.train(self.nothing, self.loss_fn, gbs=worker.dp_size, mbs=self.mbs)
        if not optimizer.stepped:
            raise MisuseError("finish_train_step(): train() without data has made no optimizer step")
        told["global_loss"] = self.loss * (self.about / (count or 1.0))
        told["all_mb_metrics"] = {
            name: _set_right(self, name, values, tokens, sequences) for name, values in self.metrics.items()
        }
        return told

    def abort(self, worker: Any) -> None:
        super().abort(worker)
        worker.optimizer.zero_grad()  # of a step that was reduced, and not taken


# ---------------------------------------------------------------------------- what train() is given
class Still:
    """In the place of an optimizer or a scheduler while train() has a slice."""

    def __init__(self, optimizer: Any = None) -> None:
        self.param_groups = getattr(optimizer, "param_groups", None)

    def zero_grad(self, *ignored: Any, **also_ignored: Any) -> None:
        pass

    def step(self, *ignored: Any, **also_ignored: Any) -> None:
        pass


class Ready:
    """The optimizer of a train() without data: it steps on the gradients that are there already."""

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
            raise MisuseError("finish_train_step(): train() has dropped the gradients before the optimizer's step")
        self.stepped = True
        return self.optimizer.step(*args, **kwargs)


class Losses:
    """A loss function that divides by `about`, and whose losses go backward by the step's `backward`.

    times: what train() multiplies losses by, to make the sum over ranks of FSDP's mean.
    """

    def __init__(self, loss_fn: Any, about: float, backward: Callable[[Any], None], times: int) -> None:
        tensor = sys.modules["torch"].Tensor

        def go_backward(loss: Any) -> None:
            backward(loss.as_subclass(tensor) * (about / times))

        self.loss_fn, self.about = loss_fn, about
        self.kind = type("Loss", (tensor,), {"backward": go_backward})  # sums and products are of it as well

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss_fn, name)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        for name in ("global_valid_seqs", "global_valid_toks"):
            kwargs[name] = kwargs[name].new_full((), self.about)
        loss, metrics = self.loss_fn(*args, **kwargs)
        return loss.as_subclass(self.kind), metrics


def _with(worker: Any, **attributes: Any) -> contextlib.AbstractContextManager[None]:
    """Those that the worker has are others for now."""
    if hasattr(worker, "timer"):  # after v0.7.0; an exception would leave it running, and the next train() refuse
        attributes["timer"] = type(worker.timer)()
    return temporarily_set(worker, **{name: value for name, value in attributes.items() if hasattr(worker, name)})


# ---------------------------------------------------------------------------- a slice
def _bins(worker: Any, data: Any) -> list[Any] | None:
    """Of the samples, where the worker does not cut them by number."""
    if not worker.cfg["dynamic_batching"]["enabled"] and not worker.enable_seq_packing:
        return None
    if data.micro_batch_indices is None or len(data.micro_batch_indices) != 1:
        raise MisuseError(
            "train_microbatch(): with dynamic batching or sequence packing expected what shard_by_batch_size() "
            "makes for one step, with its micro_batch_indices"
        )
    bins: list[Any] = data.micro_batch_indices[0]
    return bins


def _filled_up(data: Any, bins: list[Any] | None, mbs: int, passes: int) -> Any:
    """With as many microbatches as passes are to be made. What is added are samples again, which do not count."""
    if bins is None:
        return _and_again(data, [0] * (passes * mbs - data.size))
    start, end = bins[0]
    missing = passes - len(bins)
    whole = _and_again(data, [*range(start, end)] * missing)
    added = [[data.size + (end - start) * index for index in (one, one + 1)] for one in range(missing)]
    lengths = data.micro_batch_lengths[0]
    whole.micro_batch_indices = [[*bins, *added]]
    whole.micro_batch_lengths = [[*lengths, *lengths[:1] * missing]]
    whole.elem_counts_per_gb = [whole.size]
    return whole


def _and_again(data: Any, rows: list[int]) -> Any:
    if not rows:
        return data.slice(0, data.size)
    more = data.select_indices(rows)
    more["sample_mask"] = more["sample_mask"] * 0
    return type(data).from_batches([data, more])


def _nothing(data: Any) -> Any:
    """Data of one batch, with no sample in it; for train() there is one, or it would have no batch."""
    names = ("input_ids", "sample_mask", "token_mask")
    found = type(data)({name: data[name][:1] for name in names if name in data})
    found.micro_batch_indices, found.micro_batch_lengths, found.elem_counts_per_gb = [[]], [[0]], [0]
    return found


# ---------------------------------------------------------------------------- the end
def _set_right(
    split: DTensorSplitStep, name: str, values: list[Any], tokens: float, sequences: float
) -> list[Any]:
    """A metric's values, by microbatch, as train() has them."""
    used = {"global_valid_seqs": sequences, "global_valid_toks": tokens}
    if name in used:
        return [used[name]] * len(values)
    if name == "lr":
        return values
    divided_by = {"about": split.about, "tokens": tokens, "sequences": sequences}
    return [normalized(split.loss_fn, {name: value}, **divided_by)[name] for value in values]
