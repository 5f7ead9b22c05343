"""Choose the prompt group to train on next, by pure functions of the samples' tags."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import MisuseError

Samples = Mapping[Hashable, Mapping[str, Any]]
"""The tags of samples by sample key, in order of arrival; `StalenessSampler` lists a tag's fields."""


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


@dataclass
class _Found:
    """A summary of the tags of a group's samples."""

    keys: list[Hashable] = field(default_factory=list)
    expected: int = 0
    committed: bool = True
    oldest: int | None = None
    newest: int | None = None


@dataclass(frozen=True)
class StalenessSampler:
    """Picks prompt groups that are ready, not too stale, and not from the future.

    A sample's tag is a mapping with these fields:

    - ``group_id``: identifies its prompt; not None.
    - ``weight_version``: of the weights that it was sampled from; may be missing until the sample is committed.
    - ``committed``: whether the sample is complete (None: no); True if missing. A group is committed when all of
      its samples are.
    - ``expected_num_samples``: samples of its group; may be missing. If samples disagree, the largest counts.

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
        return self.sort_out(samples, trainer_version)[0]

    def evict(self, samples: Samples, trainer_version: int) -> list[Group]:
        """Return the groups that are complete, committed and too old, in order of arrival.

        Groups that are still being written are left out: the rest of such a group would come after its eviction,
        and never be complete.

        Args:
            samples: tags by sample key, in order of arrival.
            trainer_version: version of the trainer's weights, in optimizer steps.
        """
        return self.sort_out(samples, trainer_version)[1]

    def sort_out(self, samples: Samples, trainer_version: int) -> tuple[list[Group], list[Group]]:
        """Return what `eligible` and `evict` return, in one pass over the tags.

        Args:
            samples: tags by sample key, in order of arrival.
            trainer_version: version of the trainer's weights, in optimizer steps.
        """
        eligible, too_old = [], []
        for group_id, found in self._groups(samples):
            _, _, is_too_old, _ = reasons = self._reasons(found, trainer_version)
            if not any(reasons):
                eligible.append(_group(group_id, found))
            elif is_too_old and found.committed and len(found.keys) >= found.expected:
                too_old.append(_group(group_id, found))
        return sorted(eligible, key=lambda group: trainer_version - (group.weight_version or 0)), too_old

    def backlog(self, samples: Samples, trainer_version: int) -> Backlog:
        """Count the groups, and those that cannot be trained on by reason.

        Args:
            samples: tags by sample key, in order of arrival.
            trainer_version: version of the trainer's weights, in optimizer steps.
        """
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
    """A tag, checked."""

    group_id: Hashable
    committed: bool
    version: int | None
    expected: int | None


def read_tag(key: Hashable, tag: Mapping[str, Any]) -> Tag:
    """Check a tag; raise MisuseError if the sampler cannot use it."""
    group_id, committed = tag.get("group_id"), bool(tag.get("committed", True))
    version = _whole(key, tag, "weight_version")
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
    return Tag(group_id, committed, version, _whole(key, tag, "expected_num_samples"))


def _whole(key: Hashable, tag: Mapping[str, Any], name: str) -> int | None:
    value = tag.get(name)
    if type(value) is int or value is None:
        return value
    try:
        return operator.index(value)  # numpy's integers, too: they would wrap around
    except TypeError:
        raise MisuseError(f"sample {key!r} has {name}={value!r} in its tag; expected a whole number") from None


def _group(group_id: Hashable, found: _Found) -> Group:
    return Group(group_id, tuple(found.keys), found.oldest)
