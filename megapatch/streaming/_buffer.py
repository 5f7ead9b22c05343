"""What the pump asks of a buffer of rollouts, and one for rollouts of the same process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from ..errors import MisuseError
from ._sampler import Group, Samples, read_tag

_T = TypeVar("_T")
MaybeAwaitable: TypeAlias = _T | Awaitable[_T]


class Buffer(Protocol):
    """Rollouts between generation and training, of one pump at a time. Plain methods, which are called in the
    event loop and have to be quick, coroutine functions, or methods of a Ray actor.

    The pump looks at all tags when `changes` has grown: some 3 ms for 1,000 samples, in the event loop.

    Calls may fail after they took effect (a reply can be lost), and are repeated then: `give_back` and `clear`
    leave alone what they have done already, and what is not there.
    """

    def samples(self) -> MaybeAwaitable[Samples]:
        """The tags of all samples that are not claimed, in order of arrival."""

    def claim(self, group: Group, /) -> MaybeAwaitable[Any]:
        """The data of a group, which is not in `samples` from now on."""

    def give_back(self, groups: Sequence[Group], /) -> MaybeAwaitable[None]:
        """Undo the claims of these."""

    def clear(self, groups: Sequence[Group], /) -> MaybeAwaitable[None]:
        """Drop these: trained on, or too old."""

    def changes(self) -> MaybeAwaitable[int]:
        """A number that grows whenever `samples` gets more, or a tag changes."""

    def wait_for_change(self, seen: int, /) -> Awaitable[bool]:
        """Return True once `changes` is more than `seen`, and False where nothing more will come. It is cancelled
        when the pump does not need to know any more, so it cannot be a plain function that blocks."""


class RolloutBuffer:
    """A `Buffer` in memory, for one event loop; `claim` gives the list of a group's data, in the order of its
    keys.

    max_prompt_groups   claimed or not, that are in it; what begins another group waits in `put` until some are
                        cleared. An optimizer step has to fit in, and what is incomplete besides it.
    """

    def __init__(self, max_prompt_groups: int | None = None) -> None:
        self._max = max_prompt_groups
        self._tags: dict[Hashable, Mapping[str, Any]] = {}
        self._data: dict[Hashable, Any] = {}
        self._of_group: dict[Hashable, set[Hashable]] = {}
        self._claimed: set[Hashable] = set()
        self._changes = 0
        self._closed = False
        self._news, self._room = asyncio.Event(), asyncio.Event()  # each for who waits now

    async def put(self, key: Hashable, tag: Mapping[str, Any], data: Any) -> None:
        """Add a sample, or replace one that was not committed. `StalenessSampler` says what is in a tag.

        Raises MisuseError when the buffer is closed, or has a committed sample of that key, and for a tag that the
        sampler could not read.
        """
        tag = dict(tag)  # the caller may use it for the next one
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
        """Nothing more will come."""
        self._closed = True
        self._news.set()
        self._room.set()

    def samples(self) -> Samples:
        return {key: tag for key, tag in self._tags.items() if key not in self._claimed}

    def claim(self, group: Group) -> list[Any]:
        if not all(key in self._tags and key not in self._claimed for key in group.keys):
            raise MisuseError(f"claim(): prompt group {group.group_id!r} is claimed already, or gone")
        self._claimed.update(group.keys)
        return [self._data[key] for key in group.keys]

    def give_back_all(self) -> None:
        """Undo all claims: for a pump that takes the place of one that is gone."""
        self._claimed.clear()
        self._tell_of_change()

    def give_back(self, groups: Sequence[Group]) -> None:
        self._claimed.difference_update(key for group in groups for key in group.keys)
        self._tell_of_change()

    def clear(self, groups: Sequence[Group]) -> None:
        for group in groups:
            for key in group.keys:
                self._forget(key)
        self._room.set()
        self._room = asyncio.Event()

    def changes(self) -> int:
        return self._changes

    async def wait_for_change(self, seen: int) -> bool:
        while self._changes <= seen and not self._closed:
            await self._news.wait()
        return self._changes > seen

    def __len__(self) -> int:
        """Samples that are in it, claimed or not."""
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
