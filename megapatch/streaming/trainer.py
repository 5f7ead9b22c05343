"""What the pump asks of a trainer, and its train_microbatch calls under way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from .buffer import MaybeAwaitable
from .calls import SequentialCalls, failure_of


class Trainer(Protocol):
    """One optimizer step at a time, from any number of microbatch calls. Plain methods, which are called in one
    thread of their own, coroutine functions, or methods of a Ray actor, whose handle the pump is given then. They
    are called one after the other, and a call is waited for even where the pump is cancelled.

    A trainer that can refresh log-probs also has ``prepare_logprobs(data, refresh_policy_logprobs=,
    refresh_reference_logprobs=)``, which returns the data to train on; it may be called while a step is open.
    """

    def begin_train_step(self) -> MaybeAwaitable[object]: ...

    def train_microbatch(self, data: Any) -> MaybeAwaitable[object]:
        """Forward and backward of one prompt group, as the buffer gave it and the pump prepared it."""

    def finish_train_step(self) -> MaybeAwaitable[Mapping[str, Any] | object]:
        """Step the optimizer; metrics, as a mapping or a dataclass. Where it raises, the step is aborted: a
        trainer whose optimizer has stepped by then has trained on samples that come again."""

    def abort_train_step(self) -> MaybeAwaitable[object]:
        """Drop the gradients of the open step. Where none is open, after a begin that failed, say, do nothing."""


class MicrobatchQueue:
    """train_microbatch calls of one step, at most `limit` at a time made or waiting to be."""

    def __init__(self, calls: SequentialCalls, trainer: Trainer, limit: int) -> None:
        self._calls, self._trainer, self._limit = calls, trainer, limit
        self._stopped = False
        self.tasks: deque[asyncio.Task[None]] = deque()

    def put(self, data: Any) -> None:
        self.tasks.append(asyncio.ensure_future(self._train(data)))

    def reap(self) -> None:
        """Forget the calls that are over; raises what the first that failed has raised."""
        while self.tasks and self.tasks[0].done():
            self.tasks.popleft().result()

    async def wait_for_room(self) -> None:
        await self._wait_for_fewer_than(self._limit)

    async def wait_until_empty(self) -> None:
        await self._wait_for_fewer_than(1)

    async def stop(self) -> list[BaseException]:
        """Make no more calls, and wait for the one that is being made. What failed and was not raised."""
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
