"""Rollouts that have begun: how many may, and which of them training has to wait for."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Iterator, Sequence

from ._config import StreamingConfig
from ._groups import Groups
from ._in_flight import Abortable, Rollout, RolloutSeconds
from ._synced_weights import SyncedWeights
from ._tags import Group


class Rollouts:
    """Admits rollouts that can still be trained on, and keeps their durations.

    Rollouts that have begun, from the first on, are never more than those of the optimizer steps up to
    `max_staleness` after that of the weights: AReaL's bound. So those that began with weights up to a version fit
    into the optimizer steps in which they are not too old, unless newer ones take their places. "weight_fifo"
    keeps these.

    Args:
        capacity: prompt groups that the buffer holds; None: no limit.
        version: of the trainer's weights, and of generation's.
    """

    def __init__(
        self, config: StreamingConfig, weights: SyncedWeights, version: int, capacity: int | None
    ) -> None:
        self._config, self._weights, self._capacity = config, weights, capacity
        self._trainer_version = self._generation_version = version
        self._rollouts: dict[Hashable, Rollout] = {}
        self._ended: list[Rollout] = []  # and in flight
        self._running = 0  # groups with an open context
        self._claimed = 0  # of all that were announced
        self._begun = self._reported = 0
        self._waiting: Counter[Hashable] = Counter()  # contexts of a group that have not begun
        self._between_attempts: list[Hashable] = []
        self._room = asyncio.Event()  # set once, to wake those who wait now; the next ones get a new event
        self.news = asyncio.Event()  # set when a rollout ends, which may leave the buffer as it was
        self._seconds = RolloutSeconds()
        self.retries = 0  # since metrics were taken
        self.aborted: list[Hashable] = []  # groups that may have left samples in the buffer

    @contextlib.asynccontextmanager
    async def rollout(self, group_id: Hashable) -> AsyncIterator[None]:
        """Rollout loop: see `TrainPump.rollout`."""
        async with self.begun(group_id):
            yield

    @contextlib.asynccontextmanager
    async def begun(self, group_id: Hashable) -> AsyncIterator[Rollout]:
        """Rollout loop: wait for a place, and keep the rollout among the running ones in the body."""
        rollout, context = await self._begin(group_id)
        try:
            yield rollout
        except BaseException as error:
            self._end(group_id, rollout, context)
            if not rollout.running and not rollout.claimed:
                self._forget(group_id, rollout)
            if not context.swallows(error):
                raise
        else:
            self._end(group_id, rollout, context)
            context.swallows(None)

    def have_to_come_before(self, group: Group, places: int) -> bool:
        """Supply: return whether training on this group now would take the place of a rollout in flight.

        Args:
            group: one that is ready.
            places: groups that the open optimizer step still takes.
        """
        if self._config.pick != "weight_fifo":
            return False
        oversampled = self._config.oversampled_prompt_groups  # no place is kept for so many
        older = 0  # in flight, and to be trained on in the `places` up to their last optimizer step
        for version, number in sorted(Counter(rollout.version for rollout in self._in_flight).items()):
            if group.weight_version is None or version >= group.weight_version:
                break
            steps = version + self._config.max_staleness - self._trainer_version  # after the open one
            if steps < 0:
                continue  # too old already
            older += number
            if older >= places + steps * self._config.prompt_groups_per_optimizer_step + oversampled:
                return True
        return False

    def runs(self, group_id: Hashable) -> bool:
        """Orphans: return whether the group is in flight."""
        rollout = self._rollouts.get(group_id)
        return rollout is not None and rollout.in_flight

    def claimed(self, group: Group) -> None:
        """Supply: note that training has claimed the group, which makes room in the buffer."""
        if (rollout := self._rollouts.get(group.group_id)) is not None:
            self._claimed += not rollout.claimed
            rollout.claimed = True
            rollout.in_flight = False
            if self._capacity is not None:
                self._tell_of_room()

    def given_back(self, groups: Sequence[Group]) -> None:
        """Supply: undo `claimed`, after a step has failed."""
        for group in groups:
            if (rollout := self._rollouts.get(group.group_id)) is not None:
                self._claimed -= rollout.claimed
                rollout.claimed = False

    def trained(self, groups: Sequence[Group]) -> None:
        """Optimizer step: count it, and let others begin in the places of its groups."""
        self._trainer_version += 1
        self._finish(groups, "trained_")
        if self._config.abort_stale_rollouts:
            self._abort_stale()

    def _abort_stale(self) -> None:
        for group_id, rollout in list(self._rollouts.items()):
            if (
                rollout.in_flight
                and rollout.running
                and self._trainer_version - rollout.version > self._config.max_staleness
            ):
                for context in rollout.running:
                    context.abort()
                self._forget(group_id, rollout)
                self.aborted.append(group_id)

    @property
    def left_in_part(self) -> list[Hashable]:
        """Groups whose rollouts were aborted, and have not begun again."""
        return [group_id for group_id in self.aborted if group_id not in self._rollouts]

    def evicted(self, groups: Sequence[Group]) -> None:
        """Supply: forget groups that were too old; others may begin instead."""
        self._finish(groups, "evicted_")

    def given_up(self, groups: Sequence[Group]) -> None:
        """Supply: forget groups that were dropped for another reason than their age; others may begin instead."""
        for group in groups:
            if (rollout := self._rollouts.get(group.group_id)) is not None:
                self._forget(group.group_id, rollout)

    def synced(self) -> None:
        """Pump: note that generation has the trainer's weights."""
        self._generation_version = self._trainer_version
        self._tell_of_room()

    def look_begins(self) -> int:
        """Supply: begin a look at the buffer, and return the argument of `look_ended` after it."""
        return len(self._ended)

    def look_ended(self, ended: int, groups: Groups) -> None:
        """Supply: end a look. Rollouts that had ended before it are in the groups now, or nowhere (a filter)."""
        for rollout in self._ended[:ended]:
            rollout.in_flight = bool(rollout.running)  # a part of its group has begun meanwhile
        del self._ended[:ended]
        if not self._waiting:
            return
        for group_id, rollout in list(self._rollouts.items()):
            if not rollout.in_flight and not rollout.claimed and group_id not in groups:
                self._forget(group_id, rollout)

    def state(self) -> list[tuple[Hashable, float, bool]]:
        """Pump: return each group with its seconds, and whether it has not ended, in the order of their begin."""
        now = asyncio.get_running_loop().time()
        begun = [
            (group_id, (now if rollout.ended is None else rollout.ended) - rollout.begun, bool(rollout.running))
            for group_id, rollout in self._rollouts.items()
            if not rollout.claimed
        ]
        waiting = dict.fromkeys([*self._waiting, *self._between_attempts])
        return begun + [(group_id, 0.0, True) for group_id in waiting if group_id not in self._rollouts]

    @contextlib.contextmanager
    def between_attempts(self, group_id: Hashable) -> Iterator[None]:
        """Supply: keep a group in the state that has failed and will begin again, though it has no place."""
        self._between_attempts.append(group_id)
        try:
            yield
        finally:
            self._between_attempts.remove(group_id)

    def restore(self, version: int, ended: Sequence[tuple[Group, float]]) -> None:
        """Pump: begin at a version, with rollouts that have ended, each with its seconds."""
        self._trainer_version = self._generation_version = version
        now = asyncio.get_running_loop().time()
        for group, seconds in ended:
            rollout = Rollout(group.weight_version or 0, now - seconds, ended=now)
            self._rollouts[group.group_id] = rollout
            self._begun += 1
        self._reported = self._begun

    @property
    def has_begun(self) -> bool:
        """Whether a rollout was admitted."""
        return self._begun > 0

    def __str__(self) -> str:
        now = asyncio.get_running_loop().time()
        ages = [now - rollout.begun for rollout in self._in_flight]
        texts = [f"{len(ages)} rollouts in flight, the oldest for {max(ages):.0f} s"] if ages else []
        if self._waiting:
            texts.append(f"{len(self._waiting)} rollouts wait to begin, because {self._why_they_wait}")
        return "; ".join(texts)

    def take_metrics(self) -> dict[str, float]:
        """Pump: return the metrics since the last call; none where no rollout was announced."""
        begun, self._reported = self._begun - self._reported, self._begun
        metrics: dict[str, float] = {"rollouts_begun": begun} if self._begun else {}
        if self.retries:
            metrics["rollout_retries"], self.retries = self.retries, 0
        return metrics | self._seconds.take()

    async def _begin(self, group_id: Hashable) -> tuple[Rollout, Abortable]:
        self._waiting[group_id] += 1
        try:
            rollout = await self._admit(group_id)
        finally:
            self._waiting[group_id] -= 1
            if not self._waiting[group_id]:
                del self._waiting[group_id]
        rollout.in_flight = True
        self._running += not rollout.running
        rollout.running.append(Abortable())
        return rollout, rollout.running[-1]

    async def _admit(self, group_id: Hashable) -> Rollout:
        while True:
            await self._weights.permitted()
            if (rollout := self._rollouts.get(group_id)) is not None and not rollout.claimed:
                return rollout  # this is another part of one that has its place
            if self._has_room:
                rollout = Rollout(self._generation_version, asyncio.get_running_loop().time())
                self._begun += 1
                self._rollouts[group_id] = rollout
                return rollout
            self.news.set()  # there may be dropped ones
            await self._room.wait()

    @property
    def _in_flight(self) -> list[Rollout]:
        return [rollout for rollout in self._rollouts.values() if rollout.in_flight]

    @property
    def _why_they_wait(self) -> str:
        limit = self._config.max_rollouts_in_flight
        if not self._weights.admitted.is_set():
            return "weights are being synced, or could not be"
        if limit is not None and self._running >= limit:
            return f"{limit} are running (max_rollouts_in_flight)"
        if self._capacity is not None and len(self._rollouts) - self._claimed >= self._capacity:
            return f"the buffer holds no more (max_prompt_groups={self._capacity})"
        return f"{len(self._rollouts)} have begun, and no more can be trained on (max_staleness)"

    @property
    def _has_room(self) -> bool:
        limit = self._config.max_rollouts_in_flight
        if limit is not None and self._running >= limit:
            return False
        if self._config.pick == "windowed":
            return True
        begun = len(self._rollouts)
        if self._capacity is not None and begun - self._claimed >= self._capacity:
            return False  # the last of these would wait in put(), maybe for one that nothing is trained on without
        ahead = self._config.max_staleness + self._generation_version + 1 - self._trainer_version
        bound = ahead * self._config.prompt_groups_per_optimizer_step
        return begun < bound + self._config.oversampled_prompt_groups

    def _end(self, group_id: Hashable, rollout: Rollout, context: Abortable) -> None:
        rollout.running.remove(context)
        if rollout.running:
            return
        self._running -= 1
        if self._config.max_rollouts_in_flight is not None:
            self._tell_of_room()
        rollout.ended = asyncio.get_running_loop().time()
        self._seconds.add("aborted_" if context.is_aborted else "", rollout.ended - rollout.begun)
        if rollout.in_flight:
            self._ended.append(rollout)
        self.news.set()

    def _finish(self, groups: Sequence[Group], kind: str) -> None:
        now = asyncio.get_running_loop().time()
        for group in groups:
            if (rollout := self._rollouts.get(group.group_id)) is not None:
                ended = now if rollout.ended is None else rollout.ended
                self._seconds.add(kind, ended - rollout.begun)
                self._forget(group.group_id, rollout)

    def _forget(self, group_id: Hashable, rollout: Rollout) -> None:
        if self._rollouts.get(group_id) is rollout:
            rollout.in_flight = False
            self._claimed -= rollout.claimed
            del self._rollouts[group_id]
            self._tell_of_room()

    def _tell_of_room(self) -> None:
        self._room.set()
        self._room = asyncio.Event()
