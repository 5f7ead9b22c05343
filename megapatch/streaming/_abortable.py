"""A block of code that another task can end, as asyncio.timeout() ends one."""

from __future__ import annotations

import asyncio
import sys


class Abortable:
    """The rest of the current task's block. Make it when the block begins, and ask `swallows` when it ends."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None  # an asynchronous context runs in one
        self._task, self._before = task, self._cancellations(task)
        self.is_aborted = False

    def abort(self) -> None:
        """Cancel the block, once."""
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
