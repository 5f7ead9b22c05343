"""Facts about objects of Megatron's that do not stand on them: none is pickled, copied, saved or compared."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

_NOTHING = object()


class _Fact:
    """A fact about one object; its value is `_NOTHING` once it was taken back or the object is gone."""

    __slots__ = ("owner", "value")

    def __init__(self, owner: weakref.ref[Any], value: Any) -> None:
        self.owner, self.value = owner, value


class SideTable:
    """One fact about each of some objects, until the object is gone.

    By identity, as tensors compare by elements. A copy of an object has none of its facts. An attribute of ours
    would be in every pickled parameter and in the ``vars()`` of every optimizer that somebody saves.

    The dictionary itself changes only when a new object comes: torch.compile looks at all that is in there, and
    repeats a change of it later, when some may be gone.
    """

    def __init__(self) -> None:
        self._facts: dict[int, _Fact] = {}
        self._gone: list[int] = []

    def _fact(self, owner: Any) -> _Fact | None:
        fact = self._facts.get(id(owner))
        return None if fact is None or fact.owner() is not owner else fact

    def get(self, owner: Any, default: Any = None) -> Any:
        fact = self._fact(owner)
        return default if fact is None or fact.value is _NOTHING else fact.value

    def get_or_make(self, owner: Any, make: Callable[[], Any]) -> Any:
        """Return the fact, made now if there is none."""
        if (found := self.get(owner, _NOTHING)) is _NOTHING:
            self.set(owner, found := make())
        return found

    def set(self, owner: Any, value: Any) -> None:
        """Note the fact. It must not refer to its owner, which would live for ever."""
        if (fact := self._fact(owner)) is not None:
            fact.value = value
            return
        key, facts, gone = id(owner), self._facts, self._gone

        def forget(reference: weakref.ref[Any]) -> None:
            if (fact := facts.get(key)) is not None and fact.owner is reference:
                fact.value = _NOTHING
                gone.append(key)

        while gone:
            past = gone.pop()
            if (fact := facts.get(past)) is not None and fact.owner() is None:
                facts.pop(past, None)
        facts[key] = _Fact(weakref.ref(owner, forget), value)

    def pop(self, owner: Any, default: Any = None) -> Any:
        if (fact := self._fact(owner)) is None or fact.value is _NOTHING:
            return default
        value, fact.value = fact.value, _NOTHING
        return value

    def __contains__(self, owner: Any) -> bool:
        return self.get(owner, _NOTHING) is not _NOTHING
