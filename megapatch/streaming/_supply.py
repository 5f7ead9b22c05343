"""Wait for the next prompt group to train on, without polling."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from .._pausing.waiting import failure_of
from .._version import see
from ._calls import MicrobatchQueue, Watchdog, perform, run_to_end
from ._config import StreamingConfig
from ._groups import Group, Groups
from ._parts import Buffer
from ._rollouts import Rollouts

log = logging.getLogger("megapatch")


class Supply:
    """The groups of a buffer, in the order of the configured policy."""

    def __init__(
        self, buffer: Buffer, config: StreamingConfig, rollouts: Rollouts, version: int, watchdog: Watchdog
    ) -> None:
        self._buffer, self._config, self._rollouts, self._watchdog = buffer, config, rollouts, watchdog
        self._groups = Groups({}, config, version)
        self._looked_at: tuple[int, int] | None = None  # the changes and the version for which they were found
        self._next_look = 0.0  # of the event loop's time()
        self._warned = False
        self.evicted = 0  # prompt groups, so far

    async def next_group(self, version: int, needed: int, places: int, queue: MicrobatchQueue) -> Group | None:
        """Training loop: wait for `needed` eligible groups and return the first; clear groups that are too old.

        Returns None if the buffer was closed and no more will come. Raises the exception of a microbatch call of
        the queue that fails meanwhile.

        Args:
            version: of the trainer's weights.
            needed: eligible groups without which none is returned.
            places: groups that the optimizer step still takes.
        """
        with self._watchdog.watching("a prompt group to train on"):
            while True:
                queue.reap()
                self._rollouts.news.clear()
                seen = await self._look(version)
                best, eligible = self._groups.pick()
                group = best if eligible >= needed else None
                if group is not None and not self._rollouts.have_to_come_before(group, places):
                    return group
                if not await self._wait_for_change(seen, queue):
                    return group  # the older ones will not come

    def waiting(self) -> str:
        """Watchdog: return a sentence on all that waits in the buffer and in generation."""
        return "Waiting: " + "; ".join(filter(None, (str(self._groups), str(self._rollouts))))

    async def restore(self, version: int) -> tuple[list[Group], Groups]:
        """Pump, from a checkpoint: begin at a version; clear and return incomplete groups; return the others."""
        await self._read(version)
        incomplete = self._groups.unsettled()
        await self._drop(incomplete)
        return incomplete, self._groups

    async def claim(self, group: Group) -> Any:
        """Training loop: claim a group, and return its data."""
        self._groups.drop(group)
        self._rollouts.claimed(group)
        try:
            return await run_to_end(perform(self._buffer.claim, group, watchdog=self._watchdog, data=True))
        except BaseException:
            self._looked_at = None
            raise

    async def give_back(self, groups: Sequence[Group]) -> None:
        """Training loop: undo claims, after a step has failed."""
        self._looked_at = None  # a claim that failed may have changed nothing there
        self._rollouts.given_back(groups)
        await perform(self._buffer.give_back, groups, watchdog=self._watchdog)

    async def clear(self, groups: Sequence[Group]) -> None:
        """Training loop: drop groups from the buffer."""
        await run_to_end(perform(self._buffer.clear, groups, watchdog=self._watchdog))

    async def _look(self, version: int) -> int:
        """Read all tags if they or the version have changed since the last look; return the number of changes."""
        ended, failed = self._rollouts.look_begins()
        # Before samples(): a change in between is not missed.
        seen: int = await perform(self._buffer.changes, watchdog=self._watchdog)
        early = self._next_look - asyncio.get_running_loop().time()
        if self._looked_at != (seen, version) and early > 0:
            await asyncio.sleep(early)
            seen = await perform(self._buffer.changes, watchdog=self._watchdog)
        if self._looked_at != (seen, version):
            await self._read(version)
            if too_old := self._groups.too_old():
                await self._drop(too_old)
                self._count_evicted(too_old)
            self._looked_at = seen, version
        await self._drop([group for group_id in failed if (group := self._groups.in_part(group_id))])
        self._rollouts.cleared(failed)
        self._rollouts.look_ended(ended, self._groups)
        return seen

    async def _read(self, version: int) -> None:
        samples = await perform(self._buffer.samples, watchdog=self._watchdog, data=True)
        now = asyncio.get_running_loop().time
        begun = now()
        self._groups = Groups(samples, self._config, version)
        ended = now()
        # Samples that arrive one by one would have all tags read again for each: reads take a tenth of the time.
        self._next_look = ended + 9 * (ended - begun)

    async def _drop(self, groups: list[Group]) -> None:
        if groups:
            await self.clear(groups)
            for group in groups:
                self._groups.drop(group)

    def _count_evicted(self, groups: list[Group]) -> None:
        self.evicted += len(groups)
        self._rollouts.evicted(groups)
        if not self._warned:
            self._warned = True
            log.warning(
                "a prompt group was too old before it could be trained on and was dropped; further ones are only "
                "counted (evicted_prompt_groups). Mostly long rollouts are dropped, so training sees too many "
                "short ones. Begin rollouts with `async with pump.rollout(group_id)`, and see docs/streaming.md "
                "on `pick`" + see("too-old")
            )

    async def _wait_for_change(self, seen: int, queue: MicrobatchQueue) -> bool:
        """Return True after a change, False if no change will come."""
        change = asyncio.ensure_future(perform(self._buffer.wait_for_change, seen))
        change.add_done_callback(failure_of)  # so that asyncio does not report a failure nobody has asked for
        news = asyncio.ensure_future(self._rollouts.news.wait())
        try:
            while not change.done():
                queue.reap()
                await asyncio.wait({change, news, *queue.tasks}, return_when=asyncio.FIRST_COMPLETED)
                if news.done() and not change.done():
                    return True
            return bool(change.result())
        finally:
            change.cancel()
            news.cancel()
