"""Samples' tags, checked, and summed up for a prompt group."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import MisuseError

Samples = Mapping[Hashable, Mapping[str, Any]]
"""The tags of samples by sample key, in order of arrival; `StalenessSampler` lists a tag's fields."""


class Updates(NamedTuple):
    """The changes in a buffer since its pump last asked.

    Attributes:
        position: for the pump to pass when it asks again.
        is_complete: whether these are all samples, and not only those that have changed.
        samples: key, number of arrival and tag of samples; no tag means that the sample is claimed or gone. A
            sample that is given back has the number that it had before.
    """

    position: int
    is_complete: bool
    samples: Sequence[tuple[Hashable, int, Mapping[str, Any] | None]]


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


@dataclass(frozen=True)
class Backlog:
    """The contents of a buffer, and why groups cannot be trained on. One group may have several reasons.

    Attributes:
        samples: samples that are not claimed. All other fields count their prompt groups.
        groups: all groups.
        eligible: groups that can be trained on.
        incomplete: groups with fewer samples, or more, than expected.
        uncommitted: groups with a sample that is not committed.
        too_old: groups that are more than ``max_staleness`` versions behind.
        from_the_future: groups with a sample that is newer than the trainer's weights.
    """

    samples: int
    groups: int
    eligible: int
    incomplete: int
    uncommitted: int
    too_old: int
    from_the_future: int

    def __str__(self) -> str:
        return (
            f"{self.samples} samples in {self.groups} prompt groups, of which {self.eligible} eligible, "
            f"{self.incomplete} incomplete, {self.uncommitted} not committed, {self.too_old} too old, "
            f"{self.from_the_future} from the future"
        )


class Tag(NamedTuple):
    """A tag, checked."""

    group_id: Hashable
    committed: bool
    version: int | None  # of the oldest token
    newest: int | None  # which is another one only if the sample has tokens of several versions
    expected: int | None
    reward: float | None = None


def read_tag(key: Hashable, tag: Mapping[str, Any]) -> Tag:
    """Check a tag; raise MisuseError if the sampler cannot use it."""
    group_id, committed = tag.get("group_id"), bool(tag.get("committed", True))
    version: int | None = tag.get("weight_version")
    expected, newest = tag.get("expected_num_samples"), version
    if (runs := tag.get("weight_versions")) is not None:
        version, newest = versions_of(key, runs)
    elif type(version) is not int:  # a call costs as much as all the rest, for each sample
        newest = version = _whole(key, tag, "weight_version")
    if expected is not None:
        expected = _whole(key, tag, "expected_num_samples")
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
    reward = tag.get("reward")
    return Tag(group_id, committed, version, newest, expected, None if reward is None else _number(key, reward))


def _number(key: Hashable, reward: Any) -> float:
    try:
        return float(reward)
    except (TypeError, ValueError):
        raise MisuseError(f"sample {key!r} has reward={reward!r} in its tag; expected a number") from None


def _whole(key: Hashable, tag: Mapping[str, Any], name: str) -> int | None:
    value = tag.get(name)
    if type(value) is int or value is None:
        return value
    try:
        return operator.index(value)  # numpy's integers, too: they would wrap around
    except TypeError:
        raise MisuseError(f"sample {key!r} has {name}={value!r} in its tag; expected a whole number") from None


def versions_of(key: Hashable, runs: Any) -> tuple[int, int]:
    """Return the versions of the oldest and the newest token.

    Args:
        key: of the sample, for the error.
        runs: pairs of a version and the number of tokens that it made, in any order.

    Raises:
        MisuseError: these are no such pairs, or there are none.
    """
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


@dataclass(eq=False)
class Record:
    """The samples of a group, and a summary of their tags."""

    group_id: Hashable
    samples: dict[Hashable, tuple[int, Tag]] = field(default_factory=dict)  # with their number of arrival
    expected: int = 0
    uncommitted: int = 0
    oldest: int | None = None
    newest: int | None = None
    lowest: float | None = None  # reward
    highest: float | None = None
    first: int = -1  # of arrival
    last: int = -1

    def include(self, arrival: int, key: Hashable, tag: Tag, generations_per_prompt: int) -> None:
        self.first = arrival if not self.samples else min(self.first, arrival)
        self.last = max(self.last, arrival)
        self.samples[key] = arrival, tag
        expected = tag.expected or generations_per_prompt
        if expected > self.expected:
            self.expected = expected
        if not tag.committed:
            self.uncommitted += 1
        if (version := tag.version) is not None and (self.oldest is None or version < self.oldest):
            self.oldest = version
        if (newest := tag.newest) is not None and (self.newest is None or newest > self.newest):
            self.newest = newest
        if (reward := tag.reward) is not None:
            if self.lowest is None or reward < self.lowest:
                self.lowest = reward
            if self.highest is None or reward > self.highest:
                self.highest = reward

    def empty(self) -> None:
        self.samples, self.expected, self.uncommitted, self.last = {}, 0, 0, -1
        self.oldest = self.newest = self.lowest = self.highest = None

    @property
    def is_settled(self) -> bool:
        return not self.uncommitted and len(self.samples) >= self.expected

    @property
    def is_whole(self) -> bool:
        return not self.uncommitted and len(self.samples) == self.expected

    def as_group(self) -> Group:
        keys = sorted(self.samples, key=lambda key: self.samples[key][0])
        return Group(self.group_id, tuple(keys), self.oldest)
