"""Which prompt group to train on next. Pure functions over the samples' tags."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import MisuseError

Samples = Mapping[Hashable, Mapping[str, Any]]
"""The tags of samples by the samples' keys, in order of arrival; see `StalenessSampler`."""


@dataclass(frozen=True)
class Group:
    """The samples of one prompt. weight_version is the oldest of theirs; None where none has any yet."""

    group_id: Hashable
    keys: tuple[Hashable, ...]
    weight_version: int | None


@dataclass(frozen=True)
class Backlog:
    """What is in a buffer, and why it cannot be trained on. A group may have several reasons."""

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


@dataclass
class _Found:
    """What the tags of a group's samples come to."""

    keys: list[Hashable] = field(default_factory=list)
    expected: int = 0
    committed: bool = True
    oldest: int | None = None
    newest: int | None = None


@dataclass(frozen=True)
class StalenessSampler:
    """Picks prompt groups that are ready, not too stale, and not from the future.

    max_staleness            versions that a group may be behind the trainer; 0 is strictly on-policy
    generations_per_prompt   samples of a group whose tags do not say

    The tag of a sample is a mapping with

    group_id               of its prompt; not None
    weight_version         of the weights that it was sampled from; may be missing until it is committed
    committed              whether it is all there (None: no); True where missing. A group is committed when all
                           its samples are.
    expected_num_samples   of its group; may be missing. The largest counts where samples disagree

    A group with samples of several versions is as old as the oldest, and from the future if its newest one is. A
    group is complete with exactly as many samples as expected; one with more (a sample that came twice) is never
    picked.

    Raises MisuseError, which names the sample, for a tag without group_id, for one that is committed and has no
    weight_version, and for numbers that are not whole.
    """

    max_staleness: int
    generations_per_prompt: int

    def select_one_group(self, samples: Samples, trainer_version: int) -> Group | None:
        """The eligible group of the least lag, and of these the first to arrive; None where there is none."""
        return next(iter(self.eligible(samples, trainer_version)), None)

    def eligible(self, samples: Samples, trainer_version: int) -> list[Group]:
        """All that can be trained on, in the order in which they would be picked."""
        return self.sort_out(samples, trainer_version)[0]

    def evict(self, samples: Samples, trainer_version: int) -> list[Group]:
        """What is complete, committed and too old, in order of arrival. What is still being written is left:
        its rest would come after it was evicted, and never be complete."""
        return self.sort_out(samples, trainer_version)[1]

    def sort_out(self, samples: Samples, trainer_version: int) -> tuple[list[Group], list[Group]]:
        """What is eligible and what is to be evicted, in one look."""
        eligible, too_old = [], []
        for group_id, found in self._groups(samples):
            _, _, is_too_old, _ = reasons = self._reasons(found, trainer_version)
            if not any(reasons):
                eligible.append(_group(group_id, found))
            elif is_too_old and found.committed and len(found.keys) >= found.expected:
                too_old.append(_group(group_id, found))
        return sorted(eligible, key=lambda group: trainer_version - (group.weight_version or 0)), too_old

    def backlog(self, samples: Samples, trainer_version: int) -> Backlog:
        """What there is, in numbers of groups."""
        reasons = [self._reasons(found, trainer_version) for _, found in self._groups(samples)]
        counts = [sum(column) for column in zip(*reasons, strict=True)] or [0] * 4
        return Backlog(len(samples), len(reasons), sum(not any(each) for each in reasons), *counts)

    def _reasons(self, found: _Found, trainer_version: int) -> tuple[bool, bool, bool, bool]:
        return (
            len(found.keys) != found.expected,
            not found.committed,
            found.oldest is not None and trainer_version - found.oldest > self.max_staleness,
            found.newest is not None and found.newest > trainer_version,
        )

    def _groups(self, samples: Samples) -> Iterable[tuple[Hashable, _Found]]:
        groups: dict[Hashable, _Found] = {}
        for key, tag in samples.items():
            read = read_tag(key, tag)
            found = groups.setdefault(read.group_id, _Found())
            found.keys.append(key)
            found.expected = max(found.expected, read.expected or self.generations_per_prompt)
            found.committed &= read.committed
            if (version := read.version) is not None:
                found.oldest = version if found.oldest is None else min(found.oldest, version)
                found.newest = version if found.newest is None else max(found.newest, version)
        return groups.items()


class Tag(NamedTuple):
    """What a tag says."""

    group_id: Hashable
    committed: bool
    version: int | None
    expected: int | None


def read_tag(key: Hashable, tag: Mapping[str, Any]) -> Tag:
    """Raises MisuseError for one that a sampler cannot use."""
    group_id, committed = tag.get("group_id"), bool(tag.get("committed", True))
    version = _whole(key, tag, "weight_version")
    if group_id is None:
        raise MisuseError(f"sample {key!r} has no group_id in its tag; expected that of its prompt")
    try:
        hash(group_id)
    except TypeError:
        raise MisuseError(f"sample {key!r} has group_id={group_id!r} in its tag, which has no hash") from None
    if committed and version is None:
        raise MisuseError(
            f"sample {key!r} is committed and has no weight_version in its tag; expected the version of the "
            "weights that it was sampled from"
        )
    return Tag(group_id, committed, version, _whole(key, tag, "expected_num_samples"))


def _whole(key: Hashable, tag: Mapping[str, Any], name: str) -> int | None:
    value = tag.get(name)
    if type(value) is int or value is None:
        return value
    try:
        return operator.index(value)  # numpy's, too, which would wrap around
    except TypeError:
        raise MisuseError(f"sample {key!r} has {name}={value!r} in its tag; expected a whole number") from None


def _group(group_id: Hashable, found: _Found) -> Group:
    return Group(group_id, tuple(found.keys), found.oldest)
