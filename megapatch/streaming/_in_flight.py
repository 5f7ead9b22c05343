"""Rollouts in flight: those that a look at the buffer may not have found yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from ._abortable import Abortable


@dataclass(eq=False)
class Rollout:
    """A prompt group that was announced, until it was trained on or is given up."""

    version: int  # of the weights that it began with
    number: int  # in the order in which rollouts began
    begun: float
    ended: float | None = None
    claimed: bool = False
    running: list[Abortable] = field(default_factory=list)  # open contexts: a group may be rolled out in parts


class InFlight:
    """Rollouts from their begin until a look at the buffer that began after their end."""

    def __init__(self) -> None:
        self._rollouts: dict[Hashable, Rollout] = {}  # as they began
        self._of_version: Counter[int] = Counter()
        self._ended: list[tuple[Hashable, Rollout]] = []

    def __contains__(self, group_id: Hashable) -> bool:
        return group_id in self._rollouts

    def __iter__(self) -> Iterator[tuple[Hashable, Rollout]]:
        return iter(list(self._rollouts.items()))

    def add(self, group_id: Hashable, rollout: Rollout) -> None:
        """Add one that runs, if it is not here."""
        if group_id not in self._rollouts:
            self._rollouts[group_id] = rollout
            self._of_version[rollout.version] += 1

    def land(self, group_id: Hashable) -> None:
        """Take one out, if it is here."""
        if (rollout := self._rollouts.pop(group_id, None)) is not None:
            self._of_version[rollout.version] -= 1
            if not self._of_version[rollout.version]:
                del self._of_version[rollout.version]

    def has_ended(self, group_id: Hashable, rollout: Rollout) -> None:
        """Note that it is in the buffer now, or nowhere (a filter); the next look lands it."""
        if self._rollouts.get(group_id) is rollout:
            self._ended.append((group_id, rollout))

    def look_begins(self) -> int:
        """Return what `look_ended` gets after a look at the buffer that begins now."""
        return len(self._ended)

    def look_ended(self, ended: int) -> None:
        """Land those that had ended before the look."""
        for group_id, rollout in self._ended[:ended]:
            if self._rollouts.get(group_id) is rollout and not rollout.running:
                self.land(group_id)
        del self._ended[:ended]

    @property
    def first_number(self) -> float:
        """The number of the one that began first; infinite if there is none."""
        return next((rollout.number for rollout in self._rollouts.values()), float("inf"))

    def by_version(self) -> list[tuple[int, int]]:
        """Return each version with the number of rollouts that began with it, the oldest first."""
        return sorted(self._of_version.items())
