"""The cost of each patch in an ordinary step: the host's time for the same steps with it and without it, in turns.

The time is that of the thread that trains. Waiting for other ranks, which varies more than any patch costs, is not
in it; neither is the GPU, to which no patch of Megatron's gives work in an ordinary step: see `ordinary-steps`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from .in_ranks import quiet

ROUNDS = 4
STEPS = 4
"""Steps that are timed one by one, after one that is not."""


class Costs(NamedTuple):
    """The cost of patches.

    Attributes:
        step: seconds of an ordinary step.
        of: by patch, the seconds that it adds to a step, and by how much that is uncertain.
    """

    step: float
    of: dict[str, tuple[float, float]]


def costs(rank: int, world_size: int, names: tuple[str, ...]) -> Costs:
    """Time data-parallel steps with overlap, with each of these patches and without it. A collective."""
    from .._api import apply, restore
    from .check import DP
    from .checks._steps import BOTH

    quiet()
    DP.set_up()

    def timed() -> list[float]:
        model = DP.model(**BOTH)  # a model that was built with a patch keeps some of its functions
        model.train_step(0)
        found = []
        for step in range(STEPS):
            started = time.thread_time()
            model.train_step(step)
            found.append(time.thread_time() - started)
        return found

    timed()
    with_it: dict[str, list[float]] = {name: [] for name in names}  # the fastest step of each round
    without: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name in names:
            with_it[name].append(min(timed()))
            restore(name)
            without[name].append(min(timed()))
            apply()
    step = min(min(found) for found in without.values())
    return Costs(step, {name: difference(with_it[name], without[name]) for name in names})


def difference(with_it: Sequence[float], without: Sequence[float]) -> tuple[float, float]:
    """Return the seconds that a patch adds to a step, and their uncertainty: the range over the rounds.

    On a busy machine whole rounds are slow, all of their steps, so the steps of one round say nothing of that.

    Args:
        with_it: the fastest step of each round with the patch, in seconds.
        without: the same without it, measured directly after it.
    """
    found = sorted(ours - megatrons for ours, megatrons in zip(with_it, without, strict=True))
    return statistics.median(found), found[-1] - found[0]
