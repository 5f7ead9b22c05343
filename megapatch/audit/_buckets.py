"""The history of each bucket's gradients, and what several parts ask about buckets."""

from __future__ import annotations

from typing import Any

from .._mcore.bucket_groups import bucket_groups

_STATE = "_megapatch_audit_bucket"
"""Attribute of a bucket: its BucketState."""


class BucketState:
    """The history of a bucket's gradients since they were zeroed.

    Attributes:
        watcher: the part of the audit that watches it now, or None.
        arrived: the ids of the parameters whose gradients have arrived since the last step, or since they were
            zeroed. It stays the same object: hooks keep its `add`.
    """

    __slots__ = ("arrivals", "arrived", "before", "dropped", "excused", "reduces", "stepped", "watcher")

    def __init__(self) -> None:
        self.arrived: set[int] = set()
        self.begin(None)

    def begin(self, watcher: Any) -> None:
        """Forget everything, and be watched by another audit, or by none."""
        self.watcher = watcher
        self.arrivals = 0
        self.before = 0  # arrivals that were zeroed
        self.reduces = 0
        self.stepped = False  # whether an optimizer step has used them
        self.dropped = 0  # how often they were zeroed unused since the last step
        self.excused = False  # whether a call was interrupted, so that they may be dropped
        self.arrived.clear()

    @property
    def ever(self) -> int:
        """How many gradients have arrived since an audit began to watch."""
        return self.before + self.arrivals

    def reset(self) -> None:
        self.before += self.arrivals
        self.arrivals, self.reduces, self.stepped = 0, 0, False
        self.arrived.clear()


def state_of(bucket: Any) -> BucketState:
    """Return the history of a bucket: one object for all audits, as hooks keep it."""
    known: BucketState | None = vars(bucket).get(_STATE)
    if known is None:
        vars(bucket)[_STATE] = known = BucketState()
    return known


def states_of(chunk: Any) -> list[BucketState]:
    """Return the histories of a chunk's buckets."""
    return [state_of(bucket) for group in bucket_groups(chunk) for bucket in group.buckets]


def is_zero(bucket: Any, param: Any) -> bool:
    """Return whether a bucket holds nothing: asked only where it should not hold anything, as it waits for a GPU.

    A fused backward pass has added the parameter's own gradient by now.
    """
    own = getattr(param, "grad_added_to_main_grad", False)
    grads = [other.main_grad for other in bucket.params if not (own and other is param)]
    return bool(grads) and not any(bool(grad.any()) for grad in grads)


def ranks_of(group: Any) -> int:
    """Return the number of ranks over which a bucket group is reduced."""
    size = getattr(group, "intra_distributed_optimizer_instance_size", None)
    ranks = int(group.data_parallel_group.size() if size is None else size)
    others = getattr(group, "inter_distributed_optimizer_instance_group", None)
    return ranks if others is None else ranks * int(others.size())
