"""Warn of a call that takes long, and of what waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

log = logging.getLogger("megapatch")

PATIENCE = 600.0
"""Seconds after which a wait is a warning: a process may have died, or hang."""


class Watchdog:
    """Logs one warning for each call that takes `PATIENCE` seconds.

    Attributes:
        others_waiting: says what else waits; set by the pump.
    """

    def __init__(self) -> None:
        self.others_waiting: Callable[[], str] = str

    def watch(self, call: Any) -> asyncio.TimerHandle:
        """Watch a call, which is a function or text, until the result is cancelled."""
        return asyncio.get_running_loop().call_later(PATIENCE, self._warn, call)

    @contextlib.contextmanager
    def watching(self, call: Any) -> Iterator[None]:
        """Watch while this context is open."""
        timer = self.watch(call)
        try:
            yield
        finally:
            timer.cancel()

    def _warn(self, call: Any) -> None:
        what = call if isinstance(call, str) else f"{_name_of(call)}()"
        log.warning(
            "the pump waits for %s, which has not returned for %d seconds. %s",
            *(what, PATIENCE, self.others_waiting()),
        )


def _name_of(call: Any) -> str:
    for name in ("__qualname__", "_method_name"):  # the latter is of a Ray actor's method
        if isinstance(found := getattr(call, name, None), str):
            return found
    return type(call).__name__
