"""An index of samples by prompt group, at the same cost for each change, and the groups that get no more samples.

The supply keeps one for the pump; `StalenessSampler` makes one for each call.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeAlias

from ..errors import MisuseError
from ._tags import Backlog, Group, Record, Tag

_Entry: TypeAlias = "tuple[Any, int, int, Record]"

LOOKS = 4
"""How often all groups are looked at within the timeout. Each look reads them all."""


class Groups:
    """Prompt groups, sorted into ready, too old and others at a version of the trainer's weights.

    Adding or dropping a sample takes constant time (and a logarithm where a group becomes complete), `pick` looks
    at one heap per version, and `evict` only at the groups that it returns.

    Args:
        max_staleness: versions that a group may be behind.
        generations_per_prompt: samples of a group whose tags do not say how many it has.
        version: of the trainer's weights.
        pick: a policy, as `StreamingConfig.pick`.
        number_of: the place of a group in the order in which rollouts began, for the policy "in_order".
        drop_equal_rewards: whether groups whose samples all have the same reward are not to be trained on.
    """

    def __init__(
        self,
        max_staleness: int,
        generations_per_prompt: int,
        version: int,
        pick: str = "windowed",
        number_of: Callable[[Hashable], float] = lambda group_id: float("inf"),
        drop_equal_rewards: bool = False,
    ) -> None:
        self._drops_equal_rewards = drop_equal_rewards
        self._max_staleness, self._generations = max_staleness, generations_per_prompt
        self._by_version = pick in ("windowed", "weight_fifo")
        self._next_heap: Callable[[Iterable[int]], int] = max if pick == "windowed" else min
        self._rank: Callable[[Record], float] = {
            "in_order": lambda record: number_of(record.group_id),
            "ready_first": lambda record: record.last,
        }.get(pick, lambda record: 0)
        self.version = version
        self.reset()

    def reset(self) -> None:
        """Forget all samples."""
        self._records: dict[Hashable, Record] = {}
        self._group_of: dict[Hashable, Record] = {}
        self._settled: dict[int, dict[Hashable, Record]] = {}  # by the oldest version: complete, or more than that
        self._future: dict[int, dict[Hashable, Record]] = {}  # by the newest version, which the trainer lacks
        self._equal: dict[Hashable, Record] = {}  # with equal rewards, where these are to be dropped
        self._heaps: dict[int, list[_Entry]] = {}  # entries of groups that have left stay until they are on top
        self._serials = itertools.count()
        self.ready = 0

    def __contains__(self, group_id: Hashable) -> bool:
        return group_id in self._records

    def add(self, key: Hashable, arrival: int, tag: Tag) -> None:
        """Add a sample, or replace it."""
        if key in self._group_of:
            self.drop(key)
        record = self._records.get(tag.group_id)
        if record is None:
            record = self._records[tag.group_id] = Record(tag.group_id)
        elif record.is_settled:
            self._unsettle(record)
        if self._drops_equal_rewards and tag.committed and tag.reward is None:
            raise MisuseError(
                f"sample {key!r} has no reward in its tag; expected a number, as drop_equal_rewards is set"
            )
        self._group_of[key] = record
        record.include(arrival, key, tag, self._generations)
        if record.is_settled:
            self._settle(record)

    def drop(self, key: Hashable) -> None:
        """Forget a sample, if it is there."""
        record = self._group_of.pop(key, None)
        if record is None:
            return
        if record.is_settled:
            self._unsettle(record)
        del record.samples[key]
        if not record.samples:
            del self._records[record.group_id]
            return
        rest = record.samples
        record.empty()
        for other, (arrival, tag) in rest.items():
            record.include(arrival, other, tag, self._generations)
        if record.is_settled:
            self._settle(record)

    def drop_group(self, group: Group) -> None:
        """Forget the samples of a group."""
        record = self._records.get(group.group_id)
        if (
            record is None
            or len(record.samples) != len(group.keys)
            or any(k not in record.samples for k in group.keys)
        ):
            for key in group.keys:
                self.drop(key)
        else:
            self._drop_record(record)

    def evict(self, version: int) -> list[Group]:
        """Move to a version; return the groups that are complete, committed and too old, and forget them."""
        self.version = version
        for newest in [newest for newest in self._future if newest <= version]:
            for record in self._future.pop(newest).values():
                self._push(record)
        stale = [oldest for oldest in self._settled if version - oldest > self._max_staleness]
        records = sorted((r for oldest in stale for r in self._settled[oldest].values()), key=lambda r: r.first)
        groups = [record.as_group() for record in records]
        for record in records:
            self._drop_record(record)
        if self._by_version:
            for oldest in [oldest for oldest in self._heaps if version - oldest > self._max_staleness]:
                del self._heaps[oldest]
        return groups

    def take_equal_rewards(self) -> list[Group]:
        """Return the groups that are dropped for their rewards, and forget them."""
        groups = [record.as_group() for record in self._equal.values()]
        for record in list(self._equal.values()):
            self._drop_record(record)
        return groups

    def pick(self) -> Group | None:
        """Return the group to train on next, or None."""
        while self._heaps:
            version = self._next_heap(self._heaps)
            heap = self._heaps[version]
            while heap and heap[0][3].serial != heap[0][2]:
                heapq.heappop(heap)
            if heap:
                return heap[0][3].as_group()
            del self._heaps[version]
        return None

    def all_ready(self) -> list[Group]:
        """Return all groups that can be trained on, in order of arrival."""
        records = (record for record in self._records.values() if record.serial >= 0)
        return [record.as_group() for record in sorted(records, key=lambda record: record.first)]

    @property
    def has_others(self) -> bool:
        """Whether there are groups that are not ready."""
        return len(self._records) > self.ready

    def whole(self, group_id: Hashable) -> Group | None:
        """Return the group if it is complete and committed."""
        record = self._records.get(group_id)
        return record.as_group() if record is not None and record.is_whole else None

    def in_part(self, group_id: Hashable) -> Group | None:
        """Return the group if it is here, and not complete or not committed."""
        record = self._records.get(group_id)
        return record.as_group() if record is not None and not record.is_whole else None

    def unsettled(self) -> Iterator[Group]:
        """Return the groups that cannot be trained on as they are: incomplete, not committed, or too large."""
        for record in self._records.values():
            if not record.is_whole:
                yield record.as_group()

    def backlog(self) -> Backlog:
        """Count the groups, and those that cannot be trained on by reason."""
        reasons = [self._reasons(record) for record in self._records.values()]
        counts = [sum(column) for column in zip(*reasons, strict=True)] or [0] * 4
        return Backlog(len(self._group_of), len(reasons), sum(not any(each) for each in reasons), *counts)

    def _reasons(self, record: Record) -> tuple[bool, bool, bool, bool]:
        return (
            len(record.samples) != record.expected,
            bool(record.uncommitted),
            record.oldest is not None and self.version - record.oldest > self._max_staleness,
            record.newest is not None and record.newest > self.version,
        )

    def _settle(self, record: Record) -> None:
        assert record.oldest is not None and record.newest is not None  # committed samples have a version
        self._settled.setdefault(record.oldest, {})[record.group_id] = record
        if len(record.samples) > record.expected or self.version - record.oldest > self._max_staleness:
            return
        if self._drops_equal_rewards and record.lowest == record.highest:
            self._equal[record.group_id] = record
        elif record.newest > self.version:
            self._future.setdefault(record.newest, {})[record.group_id] = record
        else:
            self._push(record)

    def _push(self, record: Record) -> None:
        assert record.oldest is not None
        record.serial = next(self._serials)
        heap = self._heaps.setdefault(record.oldest if self._by_version else 0, [])
        heapq.heappush(heap, (self._rank(record), record.first, record.serial, record))
        self.ready += 1

    def _unsettle(self, record: Record) -> None:
        for version, buckets in ((record.oldest, self._settled), (record.newest, self._future)):
            bucket = buckets.get(version, {})  # type: ignore[arg-type]
            bucket.pop(record.group_id, None)
            if not bucket:
                buckets.pop(version, None)  # type: ignore[arg-type]
        self._equal.pop(record.group_id, None)
        if record.serial >= 0:
            record.serial = -1
            self.ready -= 1

    def _drop_record(self, record: Record) -> None:
        if record.is_settled:
            self._unsettle(record)
        del self._records[record.group_id]
        for key in record.samples:
            del self._group_of[key]


class Orphans:
    """Finds groups that are not complete and have not changed for some time.

    Args:
        timeout: in seconds; None: there are none.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._looked: float | None = None
        self._since: dict[Group, float] = {}  # a group with these samples was found in this look first

    def found_in(self, groups: Groups, runs: Callable[[Hashable], bool], now: float) -> list[Group]:
        """Return the orphans, if it is time for a look.

        Args:
            groups: those of a buffer.
            runs: whether a group's rollout is known to be running.
            now: the event loop's clock.
        """
        if self._timeout is None or (self._looked is not None and now < self._looked + self._timeout / LOOKS):
            return []
        self._looked = now
        before, self._since = self._since, {}
        orphans = []
        for group in groups.unsettled():
            since = now if runs(group.group_id) else before.get(group, now)
            if now - since >= self._timeout:
                orphans.append(group)
            else:
                self._since[group] = since
        return orphans

    def seconds_to_the_next_look(self, groups: Groups, now: float) -> list[float]:
        """Return a list with the seconds, or an empty one where nothing has to be looked at."""
        if self._timeout is None or self._looked is None or not groups.has_others:
            return []
        return [max(0.0, self._looked + self._timeout / LOOKS - now)]
