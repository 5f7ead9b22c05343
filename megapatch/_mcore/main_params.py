"""Optimizers with main parameters in fp32, which they step, and half-precision ones; a chain's optimizers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from .known import OPTIMIZER, is_a

GROUPS = ("float16_groups", "fp32_from_float16_groups")
"""Lists of Float16OptimizerWithFloat16Params."""
SHARDS = ("model_float16_groups", "shard_float16_groups", "shard_fp32_from_float16_groups")
"""Lists of DistributedOptimizer."""

CHILDREN = "chained_optimizers"

LOANS = threading.local()


def children_of(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers of a chain, of chains in it too; one that is not a chain is its own only child."""
    chained = vars(optimizer).get(CHILDREN) if is_a(optimizer, OPTIMIZER) else None
    if chained is None:
        yield optimizer
    for child in chained or ():
        yield from children_of(child)


def are_lent() -> bool:
    """Return whether what this thread loads now is lent."""
    return getattr(LOANS, "under_way", False)


def has_memory(tensor: Any) -> bool:
    """Return whether a tensor's storage is there, rather than offloaded by a framework."""
    return bool(tensor.untyped_storage().nbytes()) or not tensor.numel()
