"""Measure the seconds of each phase."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Timer:
    """Adds up the seconds of each phase, by the event loop's clock.

    Phases may overlap: a trainer trains while the pump waits.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        clock = asyncio.get_running_loop().time
        begun = clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + clock() - begun

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken
