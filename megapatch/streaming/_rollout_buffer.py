"""A buffer in memory, between the rollout loop, which puts samples, and the pump, which claims them."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import MisuseError
from ._resume import FORMAT, check_format
from ._tags import Group, Samples, Updates, read_tag


class RolloutBuffer:
    """A `Buffer` in memory, for one event loop.

    Args:
        max_prompt_groups: how many prompt groups the buffer holds, without those that are claimed. A sample of
            another group waits in `put` until one is claimed or cleared. Leave room for the groups of a step, and
            for those that are still incomplete. None: no limit.
        remembered_versions: for how many versions a sample that was trained on is remembered, so that a late
            duplicate is not trained on as well. At least the pump's max_staleness.

    Attributes:
        late_duplicates: samples that `put` has ignored, because they had been trained on.
        waiting_puts: calls of `put` that wait for room.
    """

    def __init__(self, max_prompt_groups: int | None = None, remembered_versions: int = 64) -> None:
        self.max_prompt_groups, self.remembered_versions = max_prompt_groups, remembered_versions
        self.late_duplicates = self.waiting_puts = 0
        self._handed_out: set[Hashable] = set()  # groups of which all samples are claimed
        self._trained: dict[Hashable, int] = {}  # keys that were claimed and cleared, with their version
        self._trained_of: dict[int, list[Hashable]] = {}  # the same keys by version
        self._tags: dict[Hashable, Mapping[str, Any]] = {}
        self._data: dict[Hashable, Any] = {}
        self._of_group: dict[Hashable, set[Hashable]] = {}
        self._claimed: set[Hashable] = set()
        self._numbers: dict[Hashable, int] = {}  # of arrival
        self._puts = self._position = 0
        self._updated: dict[Hashable, None] | None = None  # since updates() returned this position; None: too many
        self._changes = 0
        self._closed = False
        # Set once, to wake those who wait now; the next ones get a new event.
        self._news: asyncio.Event | None = None  # nobody waits
        self._room = asyncio.Event()

    async def put(self, key: Hashable, tag: Mapping[str, Any], data: Any) -> None:
        """Rollout loop: add a sample, or replace one that was not committed. Waits while the buffer is full.

        A sample that comes again after it was trained on, from weights that are not newer, is ignored.

        Args:
            key: identifies the sample.
            tag: describes the sample; `StalenessSampler` lists the fields.
            data: the sample. `claim` passes it on as it is.

        Raises:
            MisuseError: the buffer is closed or has a committed sample of that key, or the sampler cannot read the
                tag.
        """
        tag = dict(tag)  # the caller may reuse its own for the next sample
        group_id, _, version, *_ = read_tag(key, tag)
        if "weight_versions" in tag:
            tag["weight_version"] = version  # of the oldest token
        if self._is_late(key, version):
            return
        if self._is_full_for(group_id, key):
            await self._wait_for_room(group_id, key)
        if self._closed:
            raise MisuseError(f"put({key!r}): the buffer is closed")
        if key in self._tags and self._tags[key].get("committed", True):
            raise MisuseError(f"put({key!r}): there is a committed sample of that key already")
        self._forget(key)
        self._add(key, tag, data)
        self._note((key,))
        self._tell_of_change()

    def close(self) -> None:
        """Rollout loop: say that nothing more will come. Calls of `put`, waiting ones too, raise MisuseError."""
        self._closed = True
        self._wake()
        self._room.set()

    def samples(self) -> Samples:
        """Training loop: return the tags of all samples that are not claimed, in order of arrival."""
        return {key: tag for key, tag in self._tags.items() if key not in self._claimed}

    def claim(self, group: Group) -> list[Any]:
        """Training loop: claim a group.

        Returns:
            The data of its samples, in the order of ``group.keys``.

        Raises:
            MisuseError: a sample of the group is claimed already, or not in the buffer.
        """
        if not all(key in self._tags and key not in self._claimed for key in group.keys):
            raise MisuseError(f"claim(): prompt group {group.group_id!r} is claimed already, or gone")
        self._claimed.update(group.keys)
        self._note(group.keys)
        for group_id in {self._tags[key]["group_id"] for key in group.keys}:
            if self._of_group[group_id] <= self._claimed:
                self._handed_out.add(group_id)
        self._tell_of_room()
        return [self._data[key] for key in group.keys]

    def give_back_all(self) -> None:
        """Your code: undo all claims, before a new pump replaces one that is gone."""
        self._note(self._claimed)
        self._claimed.clear()
        self._handed_out.clear()
        self._tell_of_change()

    def give_back(self, groups: Sequence[Group]) -> None:
        """Training loop: undo the claims of these groups. Others among them are left as they are."""
        for group in groups:
            self._claimed.difference_update(group.keys)
            self._handed_out.difference_update(
                self._tags[key]["group_id"] for key in group.keys if key in self._tags
            )
            self._note(group.keys)
        self._tell_of_change()

    def clear(self, groups: Sequence[Group]) -> None:
        """Training loop: drop these groups, claimed or not. It is not an error if they are gone."""
        for group in groups:
            for key in group.keys:
                if key in self._claimed:  # not evicted, or left behind by a worker that has died
                    self._remember(key, self._tags[key]["weight_version"])
                self._forget(key)
            self._note(group.keys)
        self._tell_of_room()

    def updates(self, seen: int) -> Updates:
        """Training loop: return the samples that have changed since an earlier call.

        Args:
            seen: the position that the last call has returned. For any other, all samples are returned.
        """
        updated = self._updated if seen == self._position else None
        is_complete = updated is None
        self._position, self._updated = self._position + 1, {}
        samples = [
            (key, self._numbers[key], self._tags[key])
            if key in self._tags and key not in self._claimed
            else (key, -1, None)
            for key in (self._tags if updated is None else updated)
        ]
        return Updates(self._position, is_complete, samples)

    def changes(self) -> int:
        """Training loop: return a number that grows whenever `samples` gets another one or a tag changes."""
        return self._changes

    async def wait_for_change(self, seen: int) -> bool:
        """Training loop: wait for a change.

        Args:
            seen: a value that `changes` has returned.

        Returns:
            True once `changes` is more than `seen`; False if the buffer was closed first.
        """
        while self._changes <= seen and not self._closed:
            self._news = self._news or asyncio.Event()
            await self._news.wait()
        return self._changes > seen

    def state_dict(self) -> dict[str, Any]:
        """`TrainPump.state_dict`: return the samples, claimed or not, and the keys of those trained on.

        The data are the objects that `put` got, not copies. To keep checkpoints small, put references: a path, or
        a key of a store that outlives the process.
        """
        samples = [(key, tag, self._data[key]) for key, tag in self._tags.items()]
        return {"format": FORMAT, "samples": samples, "trained": list(self._trained.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """`TrainPump.load_state_dict`: take another buffer's samples, even more than `max_prompt_groups`.

        None of them is claimed.

        Args:
            state: a result of `state_dict`.

        Raises:
            MisuseError: the buffer has had samples, or the state is of another format.
        """
        if self._puts or self._trained:
            raise MisuseError("load_state_dict(): the buffer has had samples already; load into a new one")
        check_format("the buffer's state", state)
        for key, tag, data in state["samples"]:
            self._add(key, tag, data)
        for key, version in state["trained"]:
            self._remember(key, version)
        self._tell_of_change()

    def __len__(self) -> int:
        """Return the number of samples, claimed or not."""
        return len(self._tags)

    def _add(self, key: Hashable, tag: Mapping[str, Any], data: Any) -> None:
        self._tags[key], self._data[key], self._numbers[key] = tag, data, self._puts
        self._puts += 1
        self._of_group.setdefault(tag["group_id"], set()).add(key)
        self._handed_out.discard(tag["group_id"])

    def _forget(self, key: Hashable) -> None:
        if key not in self._tags:
            return
        group_id = self._tags.pop(key)["group_id"]
        del self._data[key], self._numbers[key]
        self._claimed.discard(key)
        self._of_group[group_id].discard(key)
        if not self._of_group[group_id]:
            del self._of_group[group_id]
            self._handed_out.discard(group_id)

    def _remember(self, key: Hashable, version: int) -> None:
        self._trained[key] = version
        if version not in self._trained_of:
            self._trained_of[version] = []
            for old in [old for old in self._trained_of if version - old > self.remembered_versions]:
                for other in self._trained_of.pop(old):
                    if self._trained.get(other) == old:
                        del self._trained[other]
        self._trained_of[version].append(key)

    def _is_late(self, key: Hashable, version: int | None) -> bool:
        trained = self._trained.get(key)
        if trained is None or (version is not None and version > trained):
            return False
        self.late_duplicates += 1
        return True

    async def _wait_for_room(self, group_id: Hashable, key: Hashable) -> None:
        self.waiting_puts += 1
        try:
            while self._is_full_for(group_id, key) and not self._closed:
                await self._room.wait()
        finally:
            self.waiting_puts -= 1

    def _is_full_for(self, group_id: Hashable, key: Hashable) -> bool:
        if self.max_prompt_groups is None or group_id in self._of_group:
            return False
        leaves_room = key in self._tags and len(self._of_group[self._tags[key]["group_id"]]) == 1
        return len(self._of_group) - len(self._handed_out) - leaves_room >= self.max_prompt_groups

    def _note(self, keys: Iterable[Hashable]) -> None:
        if self._updated is None:
            return
        self._updated.update(dict.fromkeys(keys))
        if len(self._updated) > 2 * len(self._tags) + 1000:  # nobody asks; all samples are less
            self._updated = None

    def _tell_of_room(self) -> None:
        self._room.set()
        self._room = asyncio.Event()

    def _tell_of_change(self) -> None:
        self._changes += 1
        self._wake()

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None
