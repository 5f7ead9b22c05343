"""Rollouts that have begun: how many may, and which of them training has to wait for."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Sequence
from dataclasses import dataclass

from ..errors import MisuseError
from ._config import StreamingConfig
from ._groups import Group, Groups
from ._synced_weights import SyncedWeights


@dataclass(eq=False)
class Rollout:
    """A prompt group that was announced, until it was trained on or is given up."""

    version: int  # of the weights that it began with
    begun: float
    running: bool = True
    in_flight: bool = True  # from its begin until a look at the buffer that began after its end
    claimed: bool = False


class Rollouts:
    """Admits rollouts that can still be trained on.

    AReaL's bound: rollouts ever begun <= (version + max_staleness + 1) x rollouts of a step. So rollouts that
    began with weights up to a version fit into the optimizer steps before they are too old, unless newer ones
    take their places. "weight_fifo" keeps these places.

    Args:
        version: of the trainer's weights, and of generation's.
    """

    def __init__(self, config: StreamingConfig, weights: SyncedWeights, version: int) -> None:
        self._config, self._weights = config, weights
        self._trainer_version = self._generation_version = version
        self._rollouts: dict[Hashable, Rollout] = {}
        self._ended: list[Rollout] = []  # and in flight
        self._begun = self._reported = 0
        self._waiting: dict[Hashable, None] = {}  # groups that have not begun
        self._room = asyncio.Event()  # set once, to wake those who wait now; the next ones get a new event
        self.news = asyncio.Event()  # set when a rollout ends, which may leave the buffer as it was
        self.failed: dict[Hashable, None] = {}  # groups that may have left samples in the buffer

    @contextlib.asynccontextmanager
    async def rollout(self, group_id: Hashable) -> AsyncIterator[None]:
        """Rollout loop: see `TrainPump.rollout`."""
        rollout = await self._begin(group_id)
        try:
            yield
        except BaseException:
            if self._rollouts.get(group_id) is rollout and not rollout.claimed:
                self.failed[group_id] = None
                self._forget(group_id)
            raise
        finally:
            rollout.running = False
            if rollout.in_flight:
                self._ended.append(rollout)
            self.news.set()

    def have_to_come_before(self, group: Group, places: int) -> bool:
        """Supply: return whether training on this group now would take the place of a rollout in flight.

        Args:
            group: one that is ready.
            places: groups that the open optimizer step still takes.
        """
        if self._config.pick != "weight_fifo":
            return False
        older = 0  # in flight, and to be trained on in the `places` up to their last optimizer step
        for version, number in sorted(Counter(rollout.version for rollout in self._in_flight).items()):
            if group.weight_version is None or version >= group.weight_version:
                break
            steps = version + self._config.max_staleness - self._trainer_version  # after the open one
            if steps < 0:
                continue  # too old already
            older += number
            if older >= places + steps * self._config.prompt_groups_per_optimizer_step:
                return True
        return False

    def claimed(self, group: Group) -> None:
        """Supply: note that training has claimed the group."""
        if (rollout := self._rollouts.get(group.group_id)) is not None:
            rollout.claimed, rollout.in_flight = True, False

    def given_back(self, groups: Sequence[Group]) -> None:
        """Supply: undo `claimed`, after a step has failed."""
        for group in groups:
            if (rollout := self._rollouts.get(group.group_id)) is not None:
                rollout.claimed = False

    def trained(self, groups: Sequence[Group]) -> None:
        """Optimizer step: count it, and let others begin in the places of its groups."""
        self._trainer_version += 1
        self.evicted(groups)

    def evicted(self, groups: Sequence[Group]) -> None:
        """Supply: forget groups; others may begin instead."""
        for group in groups:
            self._forget(group.group_id)

    def synced(self) -> None:
        """Pump: note that generation has the trainer's weights."""
        self._generation_version = self._trainer_version
        self._tell_of_room()

    def look_begins(self) -> tuple[int, list[Hashable]]:
        """Supply: begin a look at the buffer; return the argument of `look_ended`, and groups that had failed."""
        return len(self._ended), list(self.failed)

    def look_ended(self, ended: int, groups: Groups) -> None:
        """Supply: end a look. Rollouts that had ended before it are in the groups now, or nowhere (a filter)."""
        for rollout in self._ended[:ended]:
            rollout.in_flight = False
        del self._ended[:ended]
        for group_id, rollout in list(self._rollouts.items()):
            if not rollout.in_flight and not rollout.claimed and group_id not in groups:
                self._forget(group_id)

    def cleared(self, failed: Sequence[Hashable]) -> None:
        """Supply: note that the samples of groups that had failed are gone, so they may begin again."""
        for group_id in failed:
            del self.failed[group_id]
        if failed:
            self._tell_of_room()

    def state(self) -> list[tuple[Hashable, bool]]:
        """Pump: return each group, and whether it has not ended, in the order of their begin."""
        begun = {group_id: rollout.running for group_id, rollout in self._rollouts.items() if not rollout.claimed}
        return list({**begun, **dict.fromkeys(self._waiting, True)}.items())

    def restore(self, version: int, ended: Sequence[Group]) -> None:
        """Pump: begin at a version, with rollouts that have ended."""
        self._trainer_version = self._generation_version = version
        now = asyncio.get_running_loop().time()
        for group in ended:
            self._rollouts[group.group_id] = Rollout(
                group.weight_version or 0, now, running=False, in_flight=False
            )

    @property
    def has_begun(self) -> bool:
        """Whether a rollout was admitted."""
        return self._begun > 0

    def __str__(self) -> str:
        now = asyncio.get_running_loop().time()
        ages = [now - rollout.begun for rollout in self._in_flight]
        texts = [f"{len(ages)} rollouts in flight, the oldest for {max(ages):.0f} s"] if ages else []
        if self._waiting:
            texts.append(f"{len(self._waiting)} rollouts wait to begin")
        return "; ".join(texts)

    def take_begun(self) -> int:
        """Pump: return the number of rollouts that have begun since the last call."""
        begun, self._reported = self._begun - self._reported, self._begun
        return begun

    async def _begin(self, group_id: Hashable) -> Rollout:
        if group_id in self._waiting:
            raise _already(group_id)
        self._waiting[group_id] = None
        try:
            while True:
                await self._weights.permitted()
                if self._may_begin(group_id):
                    break
                self.news.set()  # there may be dropped ones
                await self._room.wait()
        finally:
            del self._waiting[group_id]
        self._begun += 1
        rollout = Rollout(self._generation_version, asyncio.get_running_loop().time())
        self._rollouts[group_id] = rollout
        return rollout

    def _may_begin(self, group_id: Hashable) -> bool:
        rollout = self._rollouts.get(group_id)
        if rollout is not None and (rollout.running or rollout.claimed):
            raise _already(group_id)
        if group_id in self.failed:
            return False  # before the samples that it has left are gone
        if rollout is not None:
            return True  # in its own place
        ahead = self._config.max_staleness + self._generation_version + 1 - self._trainer_version
        return len(self._rollouts) < ahead * self._config.prompt_groups_per_optimizer_step

    @property
    def _in_flight(self) -> list[Rollout]:
        return [rollout for rollout in self._rollouts.values() if rollout.in_flight]

    def _forget(self, group_id: Hashable) -> None:
        if (rollout := self._rollouts.pop(group_id, None)) is not None:
            rollout.in_flight = False
            self._tell_of_room()

    def _tell_of_room(self) -> None:
        self._room.set()
        self._room = asyncio.Event()


def _already(group_id: Hashable) -> MisuseError:
    return MisuseError(
        f"rollout({group_id!r}): this group has begun already, and was not trained on yet; give each rollout an "
        "id of its own, such as the epoch and the prompt"
    )
