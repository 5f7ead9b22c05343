"""Rollouts one by one: how they begin, run, are aborted and end, and how long they took."""

from __future__ import annotations

import asyncio
import math
import sys
from dataclasses import dataclass, field


class Abortable:
    """The rest of the current task's block, which another task can end, as asyncio.timeout() ends one.

    Rollout loop: make it when the block begins, and ask `swallows` when it ends.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None  # an asynchronous context runs in one
        self._task, self._before = task, self._cancellations(task)
        self.is_aborted = False

    def abort(self) -> None:
        """Training loop: cancel the block, once."""
        if not self.is_aborted:
            self.is_aborted = True
            self._task.cancel()

    def swallows(self, error: BaseException | None) -> bool:
        """Return whether the block's error is that it was aborted, and its task was not cancelled, too."""
        if not self.is_aborted:
            return False
        if sys.version_info >= (3, 11):
            self._task.uncancel()
        is_cancelled = isinstance(error, asyncio.CancelledError)
        return is_cancelled and self._cancellations(self._task) <= self._before

    @staticmethod
    def _cancellations(task: asyncio.Task[object]) -> int:
        if sys.version_info >= (3, 11):
            return task.cancelling()
        return 0  # 3.10 does not count them


@dataclass(eq=False)
class Rollout:
    """A prompt group that was announced, until it was trained on or is given up."""

    version: int  # of the weights that it began with
    begun: float
    ended: float | None = None
    claimed: bool = False
    running: list[Abortable] = field(default_factory=list)  # open contexts: a group may be rolled out in parts
    in_flight: bool = False  # from its begin until a look at the buffer that began after its end


class RolloutSeconds:
    """Collects durations, by the fate of a rollout, until they are taken as metrics."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {"": [], "trained_": [], "evicted_": [], "aborted_": []}

    def add(self, kind: str, seconds: float) -> None:
        """Note a rollout; the kind is "" for those that ended, or the prefix of a metric."""
        self._seconds[kind].append(seconds)

    def take(self) -> dict[str, float]:
        """Return mean and 90th percentile by kind since the last call; none of a kind without rollouts."""
        metrics: dict[str, float] = {}
        for kind, seconds in self._seconds.items():
            if seconds:
                metrics[f"{kind}rollout_seconds"] = sum(seconds) / len(seconds)
                metrics[f"{kind}rollout_seconds_p90"] = sorted(seconds)[math.ceil(0.9 * len(seconds)) - 1]
                seconds.clear()
        return metrics
