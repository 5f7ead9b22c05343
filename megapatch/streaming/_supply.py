"""Wait for the next prompt group to train on, without polling."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ._buffer import Buffer
from ._calls import failure_of, perform, wait_out
from ._microbatches import MicrobatchQueue
from ._sampler import Backlog, Group, StalenessSampler

log = logging.getLogger("megapatch")

PATIENCE = 600.0
"""Seconds without one more eligible group until a warning lists the backlog: engines may have died, or hang."""


@dataclass(frozen=True)
class NothingLeft:
    """Why no group will come, and the contents of the buffer."""

    why: str
    backlog: Backlog


class Supply:
    """A buffer read through a sampler.

    Args:
        timeout: seconds to wait for one more eligible group; None: as long as the buffer is open.
    """

    def __init__(self, buffer: Buffer, sampler: StalenessSampler, timeout: float | None) -> None:
        self._buffer, self._sampler, self._timeout = buffer, sampler, timeout
        self._eligible: list[Group] = []
        self._looked_at: tuple[int, int] | None = None  # the changes and the version for which they were found
        self.evicted = 0  # prompt groups, so far

    async def next_group(self, version: int, needed: int, queue: MicrobatchQueue) -> Group | NothingLeft:
        """Wait for `needed` eligible groups and return the first; clear groups that are too old.

        Raises the exception of a microbatch call of the queue that fails meanwhile.
        """
        clock = asyncio.get_running_loop().time
        begun, most, warned = clock(), 0, False
        while True:
            queue.reap()
            seen = await self._look(version)
            if len(self._eligible) >= needed:
                return self._eligible[0]
            if len(self._eligible) > most:
                begun, most = clock(), len(self._eligible)
            waited = clock() - begun
            if self._timeout is not None and waited >= self._timeout:
                why = f"none came for {self._timeout:g} seconds (rollout_timeout)"
                return NothingLeft(why, await self._backlog(version))
            if waited >= PATIENCE and not warned:
                warned = True
                backlog = await self._backlog(version)
                log.warning("no prompt group to train on for %d seconds. Waiting: %s", waited, backlog)
            limits = [limit for limit in (self._timeout, None if warned else PATIENCE) if limit is not None]
            if not await self._wait_for_change(seen, queue, min(limits) - waited if limits else None):
                return NothingLeft("no more will come: the buffer is closed", await self._backlog(version))

    async def claim(self, group: Group) -> Any:
        self._eligible.remove(group)
        return await wait_out(perform(self._buffer.claim, group))

    async def give_back(self, groups: Sequence[Group]) -> None:
        self._looked_at = None  # a claim that failed may have changed nothing in the buffer
        await perform(self._buffer.give_back, groups)

    async def clear(self, groups: Sequence[Group]) -> None:
        await wait_out(perform(self._buffer.clear, groups))

    async def _look(self, version: int) -> int:
        """Read all tags if they or the version have changed since the last look; return the number of changes."""
        seen: int = await perform(self._buffer.changes)  # before samples(): a change in between is not missed
        if self._looked_at != (seen, version):
            self._looked_at = None
            self._eligible, too_old = self._sampler.sort_out(await perform(self._buffer.samples), version)
            if too_old:
                await self.clear(too_old)
                self.evicted += len(too_old)
            self._looked_at = seen, version
        return seen

    async def _backlog(self, version: int) -> Backlog:
        return self._sampler.backlog(await perform(self._buffer.samples), version)

    async def _wait_for_change(self, seen: int, queue: MicrobatchQueue, seconds: float | None) -> bool:
        """Return True after a change or when the time is over, False if no change will come."""
        change = asyncio.ensure_future(perform(self._buffer.wait_for_change, seen))
        change.add_done_callback(failure_of)  # so that asyncio does not report a failure nobody has asked for
        clock = asyncio.get_running_loop().time
        begun = clock()
        try:
            while not change.done():
                queue.reap()
                left = None if seconds is None else max(0.0, seconds - (clock() - begun))
                done, _ = await asyncio.wait(
                    {change, *queue.tasks}, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    return True
            return bool(change.result())
        finally:
            change.cancel()
