"""Comparisons in steps in which nobody waits for a device: their results stay there until they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_NEVER = 2**62


class Unread:
    """The first step in which tensors of a kind differed: one number on each device, however many steps."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, Any], Any] = {}

    def add(self, what: str, differs: Any, step: int) -> None:
        """Add whether something differs in a step: a tensor."""
        import torch

        now, place = torch.where(differs, step, _NEVER), (what, differs.device)
        before = self._first.get(place)
        self._first[place] = now if before is None else torch.minimum(before, now)

    def read(self) -> Iterator[tuple[str, int]]:
        """Yield the kinds that have differed since the last call, each with its first step. Waits for devices."""
        first, self._first = self._first, {}
        for (what, _), step in first.items():
            if int(step) < _NEVER:
                yield what, int(step)

    def clear(self) -> None:
        """Forget all results."""
        self._first.clear()
