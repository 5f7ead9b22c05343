"""The train_microbatch calls of one optimizer step."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from ._calls import SequentialCalls, failure_of
from ._trainer import Trainer


class MicrobatchQueue:
    """The train_microbatch calls of one step, of which at most `limit` are running or queued at a time."""

    def __init__(self, calls: SequentialCalls, trainer: Trainer, limit: int) -> None:
        self._calls, self._trainer, self._limit = calls, trainer, limit
        self._stopped = False
        self.tasks: deque[asyncio.Task[None]] = deque()

    def put(self, data: Any) -> None:
        self.tasks.append(asyncio.ensure_future(self._train(data)))

    def reap(self) -> None:
        """Forget finished calls; raise the exception of the first that failed."""
        while self.tasks and self.tasks[0].done():
            self.tasks.popleft().result()

    async def wait_for_room(self) -> None:
        await self._wait_for_fewer_than(self._limit)

    async def wait_until_empty(self) -> None:
        await self._wait_for_fewer_than(1)

    @property
    def failure(self) -> BaseException | None:
        """The failure of a call that was not raised."""
        failures = [failure_of(task) for task in self.tasks if task.done()]
        return next((failure for failure in failures if failure is not None), None)

    async def stop(self) -> list[BaseException]:
        """Make no more calls, wait for the running one, and return failures that were not raised."""
        self._stopped = True
        if self.tasks:
            await asyncio.wait(self.tasks)
        return [failure for task in self.tasks if (failure := failure_of(task)) is not None]

    async def _wait_for_fewer_than(self, number: int) -> None:
        self.reap()
        while len(self.tasks) >= number:
            await asyncio.wait([self.tasks[0]])  # which leaves it alone when we are cancelled
            self.reap()

    async def _train(self, data: Any) -> None:
        try:
            await self._calls(self._trainer, "train_microbatch", data, unless=lambda: self._stopped)
        except BaseException:
            self._stopped = True  # now, before the next one gets its turn
            raise
