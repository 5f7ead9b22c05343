"""The optimizers that a ChainedOptimizer is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..._mcore.known import OPTIMIZER, is_a

CHILDREN = "chained_optimizers"


def children_of(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers of a chain, of chains in it too; one that is not a chain is its own only child."""
    chained = vars(optimizer).get(CHILDREN) if is_a(optimizer, OPTIMIZER) else None
    if chained is None:
        yield optimizer
    for child in chained or ():
        yield from children_of(child)
