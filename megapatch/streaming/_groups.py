"""An index of samples by prompt group, and the groups that get no more samples.

The supply keeps one for the pump; `StalenessSampler` makes one for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import MisuseError
from ._tags import Backlog, Group, Record, Samples, Tag, read_tag

LOOKS = 4
"""How often all groups are looked at within the timeout. Each look reads them all."""

_ORDERS: dict[str, Callable[[Record], tuple[Any, int]]] = {
    "weight_fifo": lambda record: (record.oldest, record.first),
    "windowed": lambda record: (-(record.oldest or 0), record.first),
    "ready_first": lambda record: (record.last, record.first),
}


class Groups:
    """Prompt groups, sorted into ready, too old and others at a version of the trainer's weights.

    Adding or dropping a sample takes a time that does not depend on how many there are, the other methods one that
    grows with the number of groups.

    Args:
        max_staleness: versions that a group may be behind.
        generations_per_prompt: samples of a group whose tags do not say how many it has.
        version: of the trainer's weights.
        pick: a policy, as `StreamingConfig.pick`.
        drop_equal_rewards: whether groups whose samples all have the same reward are not to be trained on.
    """

    def __init__(
        self,
        max_staleness: int,
        generations_per_prompt: int,
        version: int,
        pick: str = "windowed",
        drop_equal_rewards: bool = False,
    ) -> None:
        self._max_staleness, self._generations = max_staleness, generations_per_prompt
        self._order, self._drops_equal_rewards = _ORDERS[pick], drop_equal_rewards
        self.version = version
        self.reset()

    def reset(self) -> None:
        """Forget all samples."""
        self._records: dict[Hashable, Record] = {}
        self._group_of: dict[Hashable, Record] = {}

    def __contains__(self, group_id: Hashable) -> bool:
        return group_id in self._records

    def add(self, key: Hashable, arrival: int, tag: Tag) -> None:
        """Add a sample, or replace it."""
        self.drop(key)
        if self._drops_equal_rewards and tag.committed and tag.reward is None:
            raise MisuseError(
                f"sample {key!r} has no reward in its tag; expected a number, as drop_equal_rewards is set"
            )
        record = self._records.setdefault(tag.group_id, Record(tag.group_id))
        self._group_of[key] = record
        record.include(arrival, key, tag, self._generations)

    def drop(self, key: Hashable) -> None:
        """Forget a sample, if it is there."""
        record = self._group_of.pop(key, None)
        if record is None:
            return
        del record.samples[key]
        if not record.samples:
            del self._records[record.group_id]
            return
        rest = record.samples
        record.empty()
        for other, (arrival, tag) in rest.items():
            record.include(arrival, other, tag, self._generations)

    def drop_group(self, group: Group) -> None:
        """Forget the samples of a group."""
        for key in group.keys:
            self.drop(key)

    def evict(self, version: int) -> list[Group]:
        """Move to a version; return the groups that are complete, committed and too old, and forget them."""
        self.version = version
        return self._taken(
            record for record in self._records.values() if record.is_settled and self._is_old(record)
        )

    def take_equal_rewards(self) -> list[Group]:
        """Return the groups that are dropped for their rewards, and forget them."""
        return self._taken(record for record in self._records.values() if self._is_equal(record))

    def pick(self) -> tuple[Group | None, int]:
        """Return the group to train on next, or None, and how many could be."""
        ready = list(self._ready())
        return (min(ready, key=self._order).as_group() if ready else None), len(ready)

    def ready(self) -> list[Group]:
        """Return all groups that can be trained on, in order of arrival."""
        return [record.as_group() for record in sorted(self._ready(), key=lambda record: record.first)]

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
            self._is_old(record),
            record.newest is not None and record.newest > self.version,
        )

    def _ready(self) -> Iterator[Record]:
        for record in self._records.values():
            is_there = record.is_whole and record.newest is not None and record.newest <= self.version
            if is_there and not self._is_old(record) and not self._is_equal(record):
                yield record

    def _is_old(self, record: Record) -> bool:
        return record.oldest is not None and self.version - record.oldest > self._max_staleness

    def _is_equal(self, record: Record) -> bool:
        is_equal = self._drops_equal_rewards and record.lowest == record.highest
        return is_equal and record.is_whole and not self._is_old(record)

    def _taken(self, records: Iterator[Record]) -> list[Group]:
        groups = [record.as_group() for record in sorted(records, key=lambda record: record.first)]
        for group in groups:
            self.drop_group(group)
        return groups


@dataclass(frozen=True)
class StalenessSampler:
    """Picks prompt groups that are ready, not too stale, and not from the future.

    A sample's tag is a mapping with these fields:

    - ``group_id``: identifies its prompt; not None.
    - ``weight_version``: of the weights that it was sampled from; may be missing until the sample is committed.
    - ``weight_versions``, instead, where generation continues across weight syncs: a list of pairs, each of a
      version and the number of tokens that were sampled from it.
    - ``committed``: whether the sample is complete (None: no); True if missing. A group is committed when all of
      its samples are.
    - ``expected_num_samples``: samples of its group; may be missing. If samples disagree, the largest counts.
    - ``reward``: a number, which the pump needs with `StreamingConfig.drop_equal_rewards`; the sampler ignores it.

    A group with samples of several versions is as old as its oldest sample, and from the future if its newest
    sample is. A group is complete when it has exactly as many samples as expected; one with more (a sample that
    came twice) is never picked.

    Args:
        max_staleness: versions that a group may be behind the trainer; 0 is strictly on-policy.
        generations_per_prompt: samples of a group whose tags do not say how many it has.

    Raises:
        MisuseError: from all methods: a tag has no group_id, or is committed without a weight_version, or has a
            number that is not whole. The message names the sample.
    """

    max_staleness: int
    generations_per_prompt: int

    def select_one_group(self, samples: Samples, trainer_version: int) -> Group | None:
        """Return the eligible group with the least lag, the first to arrive among equals, or None.

        Args:
            samples: tags by sample key, in order of arrival.
            trainer_version: version of the trainer's weights, in optimizer steps.
        """
        return next(iter(self.eligible(samples, trainer_version)), None)

    def eligible(self, samples: Samples, trainer_version: int) -> list[Group]:
        """Return the groups that can be trained on, in the order in which they would be picked.

        Args:
            samples: tags by sample key, in order of arrival.
            trainer_version: version of the trainer's weights, in optimizer steps.
        """
        ready = self._index(samples, trainer_version).ready()
        return sorted(ready, key=lambda group: trainer_version - (group.weight_version or 0))

    def evict(self, samples: Samples, trainer_version: int) -> list[Group]:
        """Return the groups that are complete, committed and too old, in order of arrival.

        Groups that are still being written are left out: the rest of such a group would come after its eviction,
        and never be complete.

        Args:
            samples: tags by sample key, in order of arrival.
            trainer_version: version of the trainer's weights, in optimizer steps.
        """
        return self._index(samples, trainer_version).evict(trainer_version)

    def backlog(self, samples: Samples, trainer_version: int) -> Backlog:
        """Count the groups, and those that cannot be trained on by reason.

        Args:
            samples: tags by sample key, in order of arrival.
            trainer_version: version of the trainer's weights, in optimizer steps.
        """
        return self._index(samples, trainer_version).backlog()

    def _index(self, samples: Samples, trainer_version: int) -> Groups:
        groups = Groups(self.max_staleness, self.generations_per_prompt, trainer_version)
        for number, (key, tag) in enumerate(samples.items()):
            groups.add(key, number, read_tag(key, tag))
        return groups


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
        if self._timeout is None or self._looked is None or next(groups.unsettled(), None) is None:
            return []
        return [max(0.0, self._looked + self._timeout / LOOKS - now)]
