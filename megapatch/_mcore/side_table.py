"""Facts about objects of Megatron's that do not stand on them: none is pickled, copied, saved or compared."""

from __future__ import annotations

import weakref
from typing import Any


class SideTable:
    """One fact about each of some objects, until the object is gone.

    By identity, as tensors compare by elements. A copy of an object has none of its facts. An attribute of ours
    would be in every pickled parameter and in the ``vars()`` of every optimizer that somebody saves.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def get(self, owner: Any, default: Any = None) -> Any:
        entry = self._entries.get(id(owner))
        return default if entry is None or entry[0]() is not owner else entry[1]

    def set(self, owner: Any, value: Any) -> None:
        """Note the fact. It must not refer to its owner, which would live for ever."""
        key = id(owner)
        entries = self._entries
        entry = entries.get(key)
        if entry is not None and entry[0]() is owner:
            entries[key] = entry[0], value
            return

        def forget(reference: weakref.ref[Any]) -> None:
            if (entry := entries.get(key)) is not None and entry[0] is reference:
                del entries[key]

        entries[key] = weakref.ref(owner, forget), value

    def pop(self, owner: Any, default: Any = None) -> Any:
        value = self.get(owner, default)
        self._entries.pop(id(owner), None)
        return value

    def __contains__(self, owner: Any) -> bool:
        entry = self._entries.get(id(owner))
        return entry is not None and entry[0]() is owner
