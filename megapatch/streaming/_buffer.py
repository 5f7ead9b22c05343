"""The buffer between generation and training: its protocol, and an implementation in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from ..errors import MisuseError
from ._sampler import Group, Samples, read_tag

_T = TypeVar("_T")
MaybeAwaitable: TypeAlias = _T | Awaitable[_T]


class Buffer(Protocol):
    """Rollouts between generation and training, for one pump at a time.

    Methods may be plain (they run in the event loop, so they have to be quick), coroutine functions, or methods of
    a Ray actor's handle.

    The pump reads all tags whenever `changes` has grown: about 3 ms for 1,000 samples, in the event loop.

    A call may fail after it took effect (a reply can be lost), and is then repeated. So `give_back` and `clear`
    have to accept groups that they have dealt with before, or that the buffer does not hold.
    """

    def samples(self) -> MaybeAwaitable[Samples]:
        """Return the tags of all samples that are not claimed, in order of arrival."""

    def claim(self, group: Group, /) -> MaybeAwaitable[Any]:
        """Return the data of a group, and leave the group out of `samples` from now on.

        Raises:
            MisuseError: the group is claimed already, or not in the buffer. The pump does not give it back then.
        """

    def give_back(self, groups: Sequence[Group], /) -> MaybeAwaitable[None]:
        """Undo the claims of these groups."""

    def clear(self, groups: Sequence[Group], /) -> MaybeAwaitable[None]:
        """Drop these groups: they were trained on, or are too old."""

    def changes(self) -> MaybeAwaitable[int]:
        """Return a number that grows whenever a sample is added to `samples` or a tag changes."""

    def wait_for_change(self, seen: int, /) -> Awaitable[bool]:
        """Wait for a change. The pump cancels this call when it stops waiting, so it must not block the loop.

        Args:
            seen: a value that `changes` has returned.

        Returns:
            True once `changes` is more than `seen`; False if nothing more will come.
        """


class RolloutBuffer:
    """A `Buffer` in memory, for one event loop.

    Args:
        max_prompt_groups: how many prompt groups the buffer holds, claimed or not. A sample of another group waits
            in `put` until groups are cleared. Leave room for the groups of an optimizer step and for those that
            are still incomplete. None: no limit.
    """

    def __init__(self, max_prompt_groups: int | None = None) -> None:
        self._max = max_prompt_groups
        self._tags: dict[Hashable, Mapping[str, Any]] = {}
        self._data: dict[Hashable, Any] = {}
        self._of_group: dict[Hashable, set[Hashable]] = {}
        self._claimed: set[Hashable] = set()
        self._changes = 0
        self._closed = False
        # Set once, to wake those who wait now; the next ones get a new event.
        self._news, self._room = asyncio.Event(), asyncio.Event()

    async def put(self, key: Hashable, tag: Mapping[str, Any], data: Any) -> None:
        """Add a sample, or replace one that was not committed. Waits while the buffer is full.

        Args:
            key: identifies the sample.
            tag: what the sample is; `StalenessSampler` lists the fields.
            data: the sample. `claim` passes it on as it is.

        Raises:
            MisuseError: the buffer is closed or has a committed sample of that key, or the sampler cannot read the
                tag.
        """
        tag = dict(tag)  # the caller may reuse its own for the next sample
        group_id = read_tag(key, tag).group_id
        while self._is_full_for(group_id, key) and not self._closed:
            await self._room.wait()
        if self._closed:
            raise MisuseError(f"put({key!r}): the buffer is closed")
        if key in self._tags and self._tags[key].get("committed", True):
            raise MisuseError(f"put({key!r}): there is a committed sample of that key already")
        self._forget(key)
        self._tags[key], self._data[key] = tag, data
        self._of_group.setdefault(group_id, set()).add(key)
        self._tell_of_change()

    def close(self) -> None:
        """Say that nothing more will come: `put` raises MisuseError from now on, also in calls that wait."""
        self._closed = True
        self._news.set()
        self._room.set()

    def samples(self) -> Samples:
        """Return the tags of all samples that are not claimed, in order of arrival."""
        return {key: tag for key, tag in self._tags.items() if key not in self._claimed}

    def claim(self, group: Group) -> list[Any]:
        """Claim a group.

        Returns:
            The data of its samples, in the order of ``group.keys``.

        Raises:
            MisuseError: a sample of the group is claimed already, or not in the buffer.
        """
        if not all(key in self._tags and key not in self._claimed for key in group.keys):
            raise MisuseError(f"claim(): prompt group {group.group_id!r} is claimed already, or gone")
        self._claimed.update(group.keys)
        return [self._data[key] for key in group.keys]

    def give_back_all(self) -> None:
        """Undo all claims, before a new pump replaces one that is gone."""
        self._claimed.clear()
        self._tell_of_change()

    def give_back(self, groups: Sequence[Group]) -> None:
        """Undo the claims of these groups; those that are not claimed are left alone."""
        self._claimed.difference_update(key for group in groups for key in group.keys)
        self._tell_of_change()

    def clear(self, groups: Sequence[Group]) -> None:
        """Drop these groups, claimed or not; those that are gone are left alone."""
        for group in groups:
            for key in group.keys:
                self._forget(key)
        self._room.set()
        self._room = asyncio.Event()

    def changes(self) -> int:
        """Return a number that grows whenever a sample is added to `samples` or a tag changes."""
        return self._changes

    async def wait_for_change(self, seen: int) -> bool:
        """Wait for a change.

        Args:
            seen: a value that `changes` has returned.

        Returns:
            True once `changes` is more than `seen`; False if the buffer was closed first.
        """
        while self._changes <= seen and not self._closed:
            await self._news.wait()
        return self._changes > seen

    def __len__(self) -> int:
        """Return the number of samples, claimed or not."""
        return len(self._tags)

    def _forget(self, key: Hashable) -> None:
        if key not in self._tags:
            return
        group_id = self._tags.pop(key)["group_id"]
        del self._data[key]
        self._claimed.discard(key)
        self._of_group[group_id].discard(key)
        if not self._of_group[group_id]:
            del self._of_group[group_id]

    def _is_full_for(self, group_id: Hashable, key: Hashable) -> bool:
        if self._max is None or group_id in self._of_group:
            return False
        leaves_room = key in self._tags and len(self._of_group[self._tags[key]["group_id"]]) == 1
        return len(self._of_group) - leaves_room >= self._max

    def _tell_of_change(self) -> None:
        self._changes += 1
        self._news.set()
        self._news = asyncio.Event()
