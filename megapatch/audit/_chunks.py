"""The chunks that an audit knows, which of them an optimizer steps, and the history of each bucket's gradients."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from .._mcore.bucket_groups import MODULE, bucket_groups
from .._mcore.side_table import SideTable

_STATE = SideTable()
"""By bucket: its BucketState."""
STATES = SideTable()
"""By chunk, bucket group or gradient buffer: the states of its buckets."""


class Models:
    """The DistributedDataParallel chunks that an audit knows.

    Attributes:
        chunks: those that were wrapped, or made a forward-backward call, since the audit began; in the same order
            on all ranks.
    """

    def __init__(self) -> None:
        self.chunks: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._stepped_by: weakref.WeakKeyDictionary[Any, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()
        """By optimizer its chunks: weakly, as their config refers to the optimizer and would keep them alive."""

    def add(self, chunks: Iterable[Any]) -> None:
        """Know these chunks from now on."""
        for chunk in chunks:
            self.chunks.setdefault(chunk)

    def stepped_by(self, optimizer: Any) -> list[Any]:
        """Return the chunks whose parameters an optimizer steps."""
        known = [reference() for reference in self._stepped_by.get(optimizer, ())]
        if known and None not in known:
            return known
        found = self._find(optimizer)
        self._stepped_by[optimizer] = [weakref.ref(chunk) for chunk in found]
        return found

    def optimizers_of(self, chunk: Any) -> list[Any]:
        """Return the optimizers that are known to step a chunk, of those that others consist of."""
        return [
            part
            for optimizer, chunks in list(self._stepped_by.items())
            if any(reference() is chunk for reference in chunks)
            for part in optimizers_in(optimizer)
        ]

    def _find(self, optimizer: Any) -> list[Any]:
        parts = optimizers_in(optimizer)
        ddp_class = getattr(sys.modules.get(MODULE), "DistributedDataParallel", None)
        if ddp_class is None:
            return []
        found = {id(chunk): chunk for part in parts for chunk in getattr(part, "model_chunks", ())}
        for part in parts:
            if not hasattr(part, "model_chunks"):
                parameters = {id(parameter) for parameter in _model_parameters(part)}
                found.update(
                    (id(chunk), chunk)
                    for chunk in self.chunks
                    if any(id(parameter) in parameters for parameter in chunk.param_to_bucket_group)
                )
        return [chunk for chunk in found.values() if isinstance(chunk, ddp_class)]


def optimizers_in(optimizer: Any) -> list[Any]:
    """Return the optimizers that an optimizer consists of: itself, if it contains no others."""
    inner = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if inner is None else [part for below in inner for part in optimizers_in(below)]


def grad_buffers(chunks: Iterable[Any]) -> Iterator[Any]:
    """Yield the gradient buffers of chunks, those of experts last."""
    for chunk in chunks:
        yield from getattr(chunk, "buffers", ())
        yield from getattr(chunk, "expert_parallel_buffers", ())


def first_buffer(chunk: Any) -> Any:
    """Return the first gradient buffer of a chunk; None if it has none, as torch's FSDP2."""
    return next(iter(vars(chunk).get("buffers") or ()), None)


def has_router_losses(config: Any) -> bool:
    """Return whether routers of a model have losses of their own, which they add in train() only."""
    coefficients = [getattr(config, f"moe_{loss}_loss_coeff", None) for loss in ("aux", "z")]
    return bool(getattr(config, "num_moe_experts", None)) and any(coefficients)


def _model_parameters(optimizer: Any) -> Iterator[Any]:
    for name in ("float16_groups", "fp32_from_fp32_groups"):
        for group in getattr(optimizer, name, ()):
            yield from group
    for group in optimizer.param_groups:
        yield from group["params"]


# ------------------------------------------------------------------------ buckets
class BucketState:
    """The history of a bucket's gradients since they were zeroed.

    A model may have thousands of buckets, which hooks and steps go through: all that they ask is kept here.

    Attributes:
        group: the bucket group that it is part of, a weak reference, once a chunk's states were asked for.
        parameters: of the bucket, in an order of their own.
        numbers: of the parameters in that order, by id.
        watcher: the part of the audit that watches it now, or None.
        arrivals: how many gradients have arrived since the last step, or since they were zeroed.
        arrived: for each parameter, whether one of them is its own. It stays the same list: hooks keep it.
        had: for each parameter, whether it has had a gradient in any step.
        all_had: whether all of them have.
        before: gradients that had arrived in earlier steps of this audit.
        reduces: how often the bucket was reduced since it was zeroed.
        stepped: whether an optimizer step has used its gradients.
        dropped: whether they were zeroed unused since the last step.
        excused: whether a call was interrupted, so that they may be dropped.
        late: a gradient that came after a reduce or a step, as `Ledger.report` takes it: it may yet be zeroed.
    """

    def __init__(self, bucket: Any) -> None:
        self.group: weakref.ref[Any] | None = None
        self.parameters = list(bucket.params)
        self.numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self.arrived = [False] * len(self.parameters)
        self.begin(None)

    def begin(self, watcher: Any) -> None:
        """Forget everything, and be watched by another audit, or by none."""
        self.watcher = watcher
        self.arrivals = self.reduces = self.before = 0
        self.late: tuple[Any, ...] | None = None
        self.stepped = self.excused = self.dropped = self.all_had = False
        self.had = [False] * len(self.parameters)
        self.arrived[:] = self.had

    def take(self) -> None:
        """Begin to count arrivals again, as the gradients were zeroed or used."""
        if self.arrivals:
            self.before += self.arrivals
            self.arrivals = 0
            self.arrived[:] = [False] * len(self.arrived)

    def note_had(self) -> None:
        """Note that the gradients that have arrived are a step's."""
        self.had = [had or arrived for had, arrived in zip(self.had, self.arrived, strict=True)]
        self.all_had = all(self.had)

    def reset(self) -> None:
        """Note that the gradients were zeroed."""
        self.take()
        self.reduces, self.stepped, self.late = 0, False, None


def state_of(bucket: Any) -> BucketState:
    """Return the history of a bucket: one object for all audits, as hooks keep it."""
    known: BucketState | None = _STATE.get(bucket)
    if known is None:
        known = BucketState(bucket)
        _STATE.set(bucket, known)
    return known


def states_in(holder: Any) -> list[BucketState]:
    """Return the histories of the buckets of a bucket group or a gradient buffer."""
    known: list[BucketState] | None = STATES.get(holder)
    if known is None:
        known = [state_of(bucket) for bucket in holder.buckets]
        STATES.set(holder, known)
    return known


def states_of(chunk: Any) -> list[BucketState]:
    """Return the histories of a chunk's buckets."""
    known: list[BucketState] | None = STATES.get(chunk)
    if known is None:
        known = []
        for group in bucket_groups(chunk):
            for state in states_in(group):
                state.group = weakref.ref(group)
                known.append(state)
        STATES.set(chunk, known)
    return known


def ever_arrived(chunks: Iterable[Any]) -> bool:
    """Return whether a gradient has arrived in the chunks' buckets since an audit began to watch."""
    return any(state.arrivals or state.before for chunk in chunks for state in states_of(chunk))


def numbers_of(chunks: list[Any]) -> list[int]:
    """Return numbers that change when gradients arrive, or their buffers are changed in place."""
    arrived = (state.before + state.arrivals for chunk in chunks for state in states_of(chunk))
    return [sum(arrived), *(buffer.grad_data._version for buffer in grad_buffers(chunks))]


def is_zero(state: BucketState, param: Any = None) -> bool:
    """Return whether a bucket holds nothing, but for the gradient that a fused backward pass has added by now.

    Asked only where that decides about a finding, as it waits for a GPU.
    """
    own = getattr(param, "grad_added_to_main_grad", False)
    grads = [other.main_grad for other in state.parameters if not (own and other is param)]
    return bool(grads) and not any(bool(grad.any()) for grad in grads)


def ranks_of(state: BucketState) -> int:
    """Return the number of ranks over which a bucket is reduced, with its group."""
    group: Any = state.group and state.group()
    size = getattr(group, "intra_distributed_optimizer_instance_size", None)
    ranks = int(group.data_parallel_group.size() if size is None else size)
    others = getattr(group, "inter_distributed_optimizer_instance_group", None)
    return ranks if others is None else ranks * int(others.size())
