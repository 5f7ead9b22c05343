"""Prompt groups: read from the tags of a buffer's samples, and sorted by what can be trained on.

A tag is a mapping with these fields:

group_id               identifies the sample's prompt; not None
weight_version         of the weights that it was sampled from; may be missing until the sample is committed
weight_versions        instead, where generation continues across weight syncs: a list of pairs, each of a version
                       and the number of tokens that were sampled from it
committed              whether the sample is complete (None: no); True if missing
expected_num_samples   samples of its group; may be missing. If samples disagree, the largest counts
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import MisuseError
from ._config import StreamingConfig

Samples = Mapping[Hashable, Mapping[str, Any]]
"""The tags of samples by sample key, in order of arrival; docs/streaming.md lists a tag's fields."""


@dataclass(frozen=True)
class Group:
    """The samples of one prompt.

    Attributes:
        group_id: identifies the prompt group.
        keys: the keys of its samples, in order of arrival.
        weight_version: the oldest of the samples' versions; None if none has a version yet.
    """

    group_id: Hashable
    keys: tuple[Hashable, ...]
    weight_version: int | None


# ---------------------------------------------------------------------------- tags
class Tag(NamedTuple):
    """A tag, checked."""

    group_id: Hashable
    committed: bool
    version: int | None  # of the oldest token
    newest: int | None  # which is another one only if the sample has tokens of several versions
    expected: int | None


def read_tag(key: Hashable, tag: Mapping[str, Any]) -> Tag:
    """Check a tag; raise MisuseError, which names the sample, if it cannot be used."""
    group_id, committed = tag.get("group_id"), bool(tag.get("committed", True))
    version: int | None
    newest: int | None
    if (runs := tag.get("weight_versions")) is not None:
        version, newest = _versions_of(key, runs)
    else:
        version = newest = _whole(key, tag, "weight_version")
    if group_id is None:
        raise MisuseError(f"sample {key!r} has no group_id in its tag; expected the one of its prompt")
    try:
        hash(group_id)
    except TypeError:
        raise MisuseError(f"sample {key!r} has group_id={group_id!r} in its tag, which is not hashable") from None
    if committed and version is None:
        raise MisuseError(
            f"sample {key!r} is committed and has no weight_version in its tag; expected the version of the "
            "weights that it was sampled from"
        )
    return Tag(group_id, committed, version, newest, _whole(key, tag, "expected_num_samples"))


def _whole(key: Hashable, tag: Mapping[str, Any], name: str) -> int | None:
    value = tag.get(name)
    if type(value) is int or value is None:
        return value
    try:
        return operator.index(value)  # numpy's integers, too: they would wrap around
    except TypeError:
        raise MisuseError(f"sample {key!r} has {name}={value!r} in its tag; expected a whole number") from None


def _versions_of(key: Hashable, runs: Any) -> tuple[int, int]:
    """Return the versions of the oldest and the newest token."""
    try:
        pairs = [(operator.index(version), operator.index(tokens)) for version, tokens in runs]
    except (TypeError, ValueError):
        pairs = []
    versions = [version for version, tokens in pairs if tokens]  # a pause may come before the first token
    if not versions or min(tokens for _, tokens in pairs) < 0:
        raise MisuseError(
            f"sample {key!r} has weight_versions={runs!r} in its tag; expected a list of pairs, each of a version "
            "and the number of tokens sampled from it"
        )
    return min(versions), max(versions)


# ---------------------------------------------------------------------------- groups
@dataclass(eq=False)
class Record:
    """A summary of a group's tags."""

    group_id: Hashable
    first: int  # of arrival
    last: int = 0
    keys: list[Hashable] = field(default_factory=list)
    expected: int = 0
    committed: bool = True
    oldest: int | None = None
    newest: int | None = None

    def include(self, arrival: int, key: Hashable, tag: Tag, generations_per_prompt: int) -> None:
        self.last = arrival
        self.keys.append(key)
        self.expected = max(self.expected, tag.expected or generations_per_prompt)
        self.committed = self.committed and tag.committed
        if (version := tag.version) is not None and (self.oldest is None or version < self.oldest):
            self.oldest = version
        if (newest := tag.newest) is not None and (self.newest is None or newest > self.newest):
            self.newest = newest

    @property
    def is_whole(self) -> bool:
        return self.committed and len(self.keys) == self.expected

    def as_group(self) -> Group:
        return Group(self.group_id, tuple(self.keys), self.oldest)


_ORDERS: dict[str, Callable[[Record], tuple[Any, int]]] = {
    "weight_fifo": lambda record: (record.oldest, record.first),
    "ready_first": lambda record: (record.last, record.first),
}


class Groups:
    """The prompt groups of these samples, at a version of the trainer's weights.

    A group is whole when it is committed, as all of its samples are, and has exactly as many as expected: with
    one more, a sample came twice. It is as old as its oldest sample, and from the future if its newest one is.

    Raises:
        MisuseError: a tag cannot be read. The message names the sample.
    """

    def __init__(self, samples: Samples, config: StreamingConfig, version: int) -> None:
        self._config, self._version = config, version
        self._records: dict[Hashable, Record] = {}
        for arrival, (key, its) in enumerate(samples.items()):
            tag = read_tag(key, its)
            if (record := self._records.get(tag.group_id)) is None:
                record = self._records[tag.group_id] = Record(tag.group_id, arrival)
            record.include(arrival, key, tag, config.generations_per_prompt)

    def __contains__(self, group_id: Hashable) -> bool:
        return group_id in self._records

    def drop(self, group: Group) -> None:
        """Forget a group."""
        self._records.pop(group.group_id, None)

    def too_old(self) -> list[Group]:
        """Return the groups that are complete, committed and too old, in order of arrival.

        Groups that are still being written are left out: the rest of such a group would come after its eviction,
        and never be complete.
        """
        records = self._records.values()
        settled = (record for record in records if record.committed and len(record.keys) >= record.expected)
        return [record.as_group() for record in settled if self._is_old(record)]

    def pick(self) -> tuple[Group | None, int]:
        """Return the group to train on next, or None, and how many could be."""
        ready = list(self._ready())
        order = _ORDERS[self._config.pick]
        return (min(ready, key=order).as_group() if ready else None), len(ready)

    def whole(self, group_id: Hashable) -> Group | None:
        """Return the group if it is complete and committed."""
        record = self._records.get(group_id)
        return record.as_group() if record is not None and record.is_whole else None

    def in_part(self, group_id: Hashable) -> Group | None:
        """Return the group if it is here, and not complete or not committed."""
        record = self._records.get(group_id)
        return record.as_group() if record is not None and not record.is_whole else None

    def unsettled(self) -> list[Group]:
        """Return the groups that cannot be trained on as they are: incomplete, not committed, or too large."""
        return [record.as_group() for record in self._records.values() if not record.is_whole]

    def __str__(self) -> str:
        """Count the groups, and those that cannot be trained on by reason; one may have several."""
        records = self._records.values()
        samples, ready = sum(len(record.keys) for record in records), len(list(self._ready()))
        incomplete = sum(len(record.keys) != record.expected for record in records)
        uncommitted = sum(not record.committed for record in records)
        return (
            f"{samples} samples in {len(records)} prompt groups, of which {ready} eligible, "
            f"{incomplete} incomplete, {uncommitted} not committed, {sum(map(self._is_old, records))} too old, "
            f"{sum(map(self._is_future, records))} from the future"
        )

    def _ready(self) -> Iterator[Record]:
        for record in self._records.values():
            if record.is_whole and not self._is_future(record) and not self._is_old(record):
                yield record

    def _is_old(self, record: Record) -> bool:
        return record.oldest is not None and self._version - record.oldest > self._config.max_staleness

    def _is_future(self, record: Record) -> bool:
        return record.newest is not None and record.newest > self._version
