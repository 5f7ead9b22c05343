"""Prompt groups that get no more samples, and are not complete."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from ._groups import Groups
from ._tags import Group

LOOKS = 4
"""How often all groups are looked at within the timeout. Each look reads them all."""


class Orphans:
    """Finds groups that are not complete and have not changed for some time.

    Args:
        timeout: in seconds; None: there are none.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._looked: float | None = None
        self._since: dict[Group, float] = {}  # a group with these samples was found in this look first

    def found_in(self, groups: Groups, runs: Callable[[Hashable], bool], now: float) -> list[Group]:
        """Return the orphans, if it is time for a look.

        Args:
            groups: those of a buffer.
            runs: whether a group's rollout is known to be running.
            now: the event loop's clock.
        """
        if self._timeout is None or (self._looked is not None and now < self._looked + self._timeout / LOOKS):
            return []
        self._looked = now
        before, self._since = self._since, {}
        orphans = []
        for group in groups.unsettled():
            since = now if runs(group.group_id) else before.get(group, now)
            if now - since >= self._timeout:
                orphans.append(group)
            else:
                self._since[group] = since
        return orphans

    def seconds_to_the_next_look(self, groups: Groups, now: float) -> list[float]:
        """Return a list with the seconds, or an empty one where nothing has to be looked at."""
        if self._timeout is None or self._looked is None or not groups.has_others:
            return []
        return [max(0.0, self._looked + self._timeout / LOOKS - now)]
