"""What each patch adds to an ordinary step: the host's time for the same steps with it and without it, in turns.

The time is that of the thread that trains. Waiting for other ranks, which varies more than any patch costs, is not
in it; neither is the GPU, to which no patch of Megatron's gives work in an ordinary step: see `ordinary-steps`.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from .in_ranks import end_together, quiet

ROUNDS = 4
STEPS = 4
"""Steps that are timed one by one, after one that is not."""


class Costs(NamedTuple):
    """What patches cost.

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
    with_it: dict[str, list[float]] = {name: [] for name in names}
    without: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name in names:
            with_it[name] += timed()
            restore(name)
            without[name] += timed()
            apply()
    end_together()
    fast = {name: (_fast(with_it[name]), _fast(without[name])) for name in names}
    step = min(low for pair in fast.values() for low, _ in pair)
    return Costs(
        step,
        {name: (ours[0] - megatrons[0], ours[1] + megatrons[1]) for name, (ours, megatrons) in fast.items()},
    )


def _fast(found: list[float]) -> tuple[float, float]:
    """Return the time of an undisturbed step, and by how much it is uncertain: a fast one, and the fastest."""
    ordered = sorted(found)
    fast = ordered[len(ordered) // 5]
    return fast, fast - ordered[0]
