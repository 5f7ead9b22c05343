"""What the pump asks of the buffer between generation and training."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from ._tags import Group, Samples

_T = TypeVar("_T")
MaybeAwaitable: TypeAlias = _T | Awaitable[_T]


class Buffer(Protocol):
    """Rollouts between generation and training, for one pump at a time.

    Methods may be plain (they run in the event loop, so they have to be quick), coroutine functions, or methods of
    a Ray actor's handle.

    The pump reads all tags whenever `changes` has grown, which takes the event loop about 5 ms for 1,000 samples.
    A buffer that also has ``updates(seen)`` is asked for what has changed instead, at a cost that does not depend
    on how much the buffer holds. It returns `Updates` since the position `seen`, or all samples if it does not
    know that position (-1: the pump knows nothing).

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
