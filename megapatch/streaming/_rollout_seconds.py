"""How long rollouts took, by what became of them."""

from __future__ import annotations

import math


class RolloutSeconds:
    """Collects durations until they are taken as metrics."""

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
