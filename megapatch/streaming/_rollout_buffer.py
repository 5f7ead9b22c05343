"""A buffer in memory, between the rollout loop, which puts samples, and the pump, which claims them."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from ..errors import MisuseError
from ._groups import Group, Samples, read_tag
from ._resume import FORMAT, check_format


class RolloutBuffer:
    """A `Buffer` in memory, for one event loop.

    It holds any number of samples: `TrainPump.rollout` bounds how many are made.
    """

    def __init__(self) -> None:
        self._tags: dict[Hashable, Mapping[str, Any]] = {}
        self._data: dict[Hashable, Any] = {}
        self._claimed: set[Hashable] = set()
        self._changes = 0
        self._closed = False
        self._news = asyncio.Event()  # set once, to wake those who wait now; the next ones get a new event

    async def put(self, key: Hashable, tag: Mapping[str, Any], data: Any) -> None:
        """Rollout loop: add a sample, or replace one that was not committed.

        Args:
            key: identifies the sample. One that comes again after it was trained on is another sample.
            tag: describes the sample; docs/streaming.md lists the fields.
            data: the sample. `claim` passes it on as it is.

        Raises:
            MisuseError: the buffer is closed or has a committed sample of that key, or the tag cannot be read.
        """
        tag = dict(tag)  # the caller may reuse its own for the next sample
        read_tag(key, tag)
        if self._closed:
            raise MisuseError(f"put({key!r}): the buffer is closed")
        if key in self._tags and self._tags[key].get("committed", True):
            raise MisuseError(f"put({key!r}): there is a committed sample of that key already")
        self._forget(key)
        self._tags[key], self._data[key] = tag, data
        self._tell_of_change()

    def close(self) -> None:
        """Rollout loop: say that nothing more will come. Later calls of `put` raise MisuseError."""
        self._closed = True
        self._news.set()

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
        return [self._data[key] for key in group.keys]

    def give_back(self, groups: Sequence[Group]) -> None:
        """Training loop: undo the claims of these groups. Others among them are left as they are."""
        for group in groups:
            self._claimed.difference_update(group.keys)
        self._tell_of_change()

    def clear(self, groups: Sequence[Group]) -> None:
        """Training loop: drop these groups, claimed or not. It is not an error if they are gone."""
        for group in groups:
            for key in group.keys:
                self._forget(key)

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
            await self._news.wait()
        return self._changes > seen

    def state_dict(self) -> dict[str, Any]:
        """`TrainPump.state_dict`: return the samples, claimed or not.

        The data are the objects that `put` got, not copies. To keep checkpoints small, put references: a path, or
        a key of a store that outlives the process.
        """
        return {"format": FORMAT, "samples": [(key, tag, self._data[key]) for key, tag in self._tags.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """`TrainPump.load_state_dict`: take another buffer's samples. None of them is claimed.

        Args:
            state: a result of `state_dict`.

        Raises:
            MisuseError: the buffer has had samples, or the state is of another format.
        """
        if self._changes:
            raise MisuseError("load_state_dict(): the buffer has had samples already; load into a new one")
        check_format("the buffer's state", state)
        for key, tag, data in state["samples"]:
            self._tags[key], self._data[key] = tag, data
        self._tell_of_change()

    def __len__(self) -> int:
        """Return the number of samples, claimed or not."""
        return len(self._tags)

    def _forget(self, key: Hashable) -> None:
        self._tags.pop(key, None)
        self._data.pop(key, None)
        self._claimed.discard(key)

    def _tell_of_change(self) -> None:
        self._changes += 1
        self._news.set()
        self._news = asyncio.Event()
