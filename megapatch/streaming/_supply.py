"""Wait for the next prompt group to train on, without polling, and roll groups out until they are there."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._troubleshooting import see
from ._calls import PATIENCE, Watchdog, failure_of, perform, run_to_end
from ._config import StreamingConfig
from ._groups import Groups, Orphans
from ._in_flight import Rollout
from ._parts import Buffer
from ._rollouts import Rollouts
from ._tags import Backlog, Group, Updates, read_tag

if TYPE_CHECKING:
    from ._optimizer_step import MicrobatchQueue

log = logging.getLogger("megapatch")


@dataclass(frozen=True)
class NothingLeft:
    """Why no group will come, and the contents of the buffer."""

    why: str
    backlog: Backlog


class Supply:
    """The groups of a buffer, in the order of the configured policy."""

    def __init__(
        self, buffer: Buffer, config: StreamingConfig, rollouts: Rollouts, version: int, watchdog: Watchdog
    ) -> None:
        self._buffer, self._rollouts, self._timeout = buffer, rollouts, config.rollout_timeout
        self._groups = Groups(
            config.max_staleness, config.generations_per_prompt, version, config.pick, config.drop_equal_rewards
        )
        self._looked_at: tuple[int, int] | None = None  # the changes and the version for which they were found
        self._position = -1  # of the buffer's updates
        self._watchdog = watchdog
        self._turn = asyncio.Lock()  # of those who change this index
        self._loses_by_design = config.pick == "windowed" or config.oversampled_prompt_groups > 0
        self._warned = False
        self._orphans = Orphans(config.orphan_timeout)
        self.dropped = Counter({"evicted": 0, "expired": 0, "equal_rewards": 0})  # prompt groups, so far

    async def next_group(
        self, version: int, needed: int, places: int, queue: MicrobatchQueue
    ) -> Group | NothingLeft:
        """Training loop: wait for `needed` eligible groups and return the first; clear groups that are too old.

        Raises the exception of a microbatch call of the queue that fails meanwhile.

        Args:
            version: of the trainer's weights.
            needed: eligible groups without which none is returned.
            places: groups that the optimizer step still takes.
        """
        clock = asyncio.get_running_loop().time
        begun, most, warned = clock(), 0, False
        while True:
            queue.reap()
            self._rollouts.news.clear()
            seen = await self._refresh_groups(version)
            best, eligible = self._groups.pick()
            group = best if eligible >= needed else None
            if group is not None and not self._rollouts.have_to_come_before(group, places):
                return group
            if eligible > most:
                begun, most = clock(), eligible
            waited = clock() - begun
            if self._timeout is not None and waited >= self._timeout:
                why = f"none came for {self._timeout:g} seconds (rollout_timeout)"
                return NothingLeft(why, self._groups.backlog())
            if waited >= PATIENCE and not warned:
                warned = True
                # step() has synced weights before it waits, so this is not for want of permission.
                log.warning(
                    "no prompt group to train on for %d seconds, though rollouts may begin. %s" + see("no-group"),
                    *(waited, self.waiting()),
                )
            deadlines = (self._timeout, None if warned else PATIENCE)
            limits = [limit - waited for limit in deadlines if limit is not None]
            limits += self._orphans.seconds_to_the_next_look(self._groups, clock())
            if not await self._wait_for_change(seen, queue, min(limits, default=None)):
                if group is not None:
                    return group  # the older ones will not come
                return NothingLeft("no more will come: the buffer is closed", self._groups.backlog())

    def waiting(self) -> str:
        """Watchdog: return a sentence on all that waits in the buffer, in generation, and for either of them."""
        puts = getattr(self._buffer, "waiting_puts", 0)
        blocked = f"{puts} put() calls wait for room in the buffer" if isinstance(puts, int) and puts else ""
        return "Waiting: " + "; ".join(filter(None, (str(self._groups.backlog()), str(self._rollouts), blocked)))

    async def contents(self) -> Groups:
        """Read the buffer again, and return all of its groups."""
        self._looked_at = None
        await self._read()
        return self._groups

    async def restore(self, version: int) -> tuple[list[Group], Groups]:
        """Pump, from a checkpoint: begin at a version; clear and return incomplete groups; return the others."""
        self._groups.version, self._position = version, -1
        groups = await self.contents()
        incomplete = list(groups.unsettled())
        if incomplete:
            await self.clear(incomplete)
            for group in incomplete:
                groups.drop_group(group)
        return incomplete, groups

    async def clear_aborted(self) -> None:
        """Pump, before a checkpoint: clear the samples that aborted rollouts have left."""
        async with self._turn:
            if self._rollouts.aborted:
                await self.contents()
                await self._clear_aborted()

    async def drop_in_part(self, group_id: Hashable) -> bool:
        """Clear a group's samples unless all of them are there. Return False, and leave the group, if they are."""
        async with self._turn:
            groups = await self.contents()
            if (group := groups.in_part(group_id)) is not None:
                await self._drop([group])
                groups.drop_group(group)
            return groups.whole(group_id) is None

    async def roll_out(self, group_id: Hashable, generate: Callable[[], Awaitable[object]], attempts: int) -> bool:
        """Rollout loop: see `TrainPump.roll_out`."""
        for attempt in range(1, attempts + 1):
            failure: Exception | None = None
            rollout: Rollout | None = None
            try:
                async with self._rollouts.begun(group_id) as rollout:
                    await generate()
                    return True
            except Exception as error:
                failure = error
                if rollout is None or rollout.claimed:  # it failed after all samples were there
                    raise
            with self._rollouts.between_attempts(group_id):
                try:
                    is_here = not await self.drop_in_part(group_id)
                except Exception as error:
                    raise error from failure
            if failure is not None:
                if is_here or attempt == attempts:
                    raise failure
                log.warning(
                    "attempt %d of %d to roll out prompt group %r failed, and it begins again: %s: %s"
                    + see("attempt"),
                    *(attempt, attempts, group_id, type(failure).__name__, failure),
                )
            if attempt < attempts:
                self._rollouts.retries += 1
        return False

    async def claim(self, group: Group) -> Any:
        """Training loop: claim a group, and return its data."""
        async with self._turn:
            self._groups.drop_group(group)
            self._rollouts.claimed(group)
            try:
                return await run_to_end(perform(self._buffer.claim, group, watchdog=self._watchdog, data=True))
            except BaseException:
                self._position = -1
                raise

    async def give_back(self, groups: Sequence[Group]) -> None:
        """Training loop: undo claims, after a step has failed."""
        async with self._turn:
            self._looked_at, self._position = None, -1  # a claim that failed may have changed nothing there
            self._rollouts.given_back(groups)
            await perform(self._buffer.give_back, groups, watchdog=self._watchdog)

    async def clear(self, groups: Sequence[Group]) -> None:
        """Training loop: drop groups from the buffer."""
        await run_to_end(perform(self._buffer.clear, groups, watchdog=self._watchdog))

    async def _refresh_groups(self, version: int) -> int:
        async with self._turn:
            return await self._refresh_groups_in_turn(version)

    async def _refresh_groups_in_turn(self, version: int) -> int:
        """Read all tags if they or the version have changed since the last look; return the number of changes."""
        ended = self._rollouts.look_begins()
        # Before samples(): a change in between is not missed.
        seen: int = await perform(self._buffer.changes, watchdog=self._watchdog)
        if self._looked_at != (seen, version):
            self._looked_at = None
            await self._read()
            if too_old := self._groups.evict(version):
                await self._drop(too_old)
                self._count_evicted(too_old)
            if equal := self._groups.take_equal_rewards():
                await self._drop(equal)
                self.dropped["equal_rewards"] += len(equal)
                self._rollouts.given_up(equal)
            self._looked_at = seen, version
        if self._rollouts.aborted:
            await self._clear_aborted()
        if orphans := self._orphans.found_in(self._groups, self._rollouts.runs, asyncio.get_running_loop().time()):
            await self._expire(orphans)
        self._rollouts.look_ended(ended, self._groups)
        return seen

    async def _drop(self, groups: list[Group]) -> None:
        position, self._position = self._position, -1  # if this fails, all is read again
        await self.clear(groups)
        self._position = position

    async def _read(self) -> None:
        seen, self._position = self._position, -1  # if anything fails from here on, all is read again
        updates = await self._updates_since(seen)
        if updates.is_complete:
            self._groups.reset()
        for key, number, tag in updates.samples:
            if tag is None:
                self._groups.drop(key)
            else:
                self._groups.add(key, number, read_tag(key, tag))
        self._position = updates.position

    async def _updates_since(self, seen: int) -> Updates:
        if (updates := getattr(self._buffer, "updates", None)) is not None:
            found: Updates = await perform(updates, seen, watchdog=self._watchdog, data=True)
            return found
        samples = await perform(self._buffer.samples, watchdog=self._watchdog, data=True)
        return Updates(-1, True, [(key, number, tag) for number, (key, tag) in enumerate(samples.items())])

    async def _clear_aborted(self) -> None:
        found = [self._groups.in_part(group_id) for group_id in self._rollouts.left_in_part]
        groups = [group for group in found if group is not None]
        if groups:
            await self._drop(groups)
        self._rollouts.aborted.clear()
        for group in groups:
            self._groups.drop_group(group)

    async def _expire(self, orphans: list[Group]) -> None:
        self._looked_at, self._position = None, -1  # the next look finds the rest
        await self.clear(orphans)
        self.dropped["expired"] += len(orphans)
        self._rollouts.given_up(orphans)
        for group in orphans:
            self._groups.drop_group(group)
        log.warning(
            "%d prompt groups got no more samples for a long time (orphan_timeout) and were dropped; their "
            "workers may have died. The first is %r" + see("orphans"),
            len(orphans),
            orphans[0].group_id,
        )

    def _count_evicted(self, groups: list[Group]) -> None:
        self.dropped["evicted"] += len(groups)
        self._rollouts.evicted(groups)
        if not self._warned and not self._loses_by_design:
            self._warned = True
            log.warning(
                "a prompt group was too old before it could be trained on and was dropped; further ones are only "
                "counted (evicted_prompt_groups). Mostly long rollouts are dropped, so training sees too many "
                "short ones. Begin rollouts with `async with pump.rollout(group_id)`, and see docs/streaming.md "
                "on `pick`" + see("too-old")
            )

    async def _wait_for_change(self, seen: int, queue: MicrobatchQueue, seconds: float | None) -> bool:
        """Return True after a change or when the time is over, False if no change will come."""
        change = asyncio.ensure_future(perform(self._buffer.wait_for_change, seen))
        change.add_done_callback(failure_of)  # so that asyncio does not report a failure nobody has asked for
        news = asyncio.ensure_future(self._rollouts.news.wait())
        clock = asyncio.get_running_loop().time
        begun = clock()
        try:
            while not change.done():
                queue.reap()
                left = None if seconds is None else max(0.0, seconds - (clock() - begun))
                done, _ = await asyncio.wait(
                    {change, news, *queue.tasks}, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
                if not done or (news.done() and not change.done()):
                    return True
            return bool(change.result())
        finally:
            change.cancel()
            news.cancel()
