"""Facts that an audit keeps about objects of Megatron."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from .._mcore.side_table import SideTable

_T = TypeVar("_T")
_D = TypeVar("_D")


class Facts(Generic[_T]):
    """One kind of fact of one audit, at most one for each object, and gone with the object or the audit.

    A fact must not refer to its object, nor to what does: a module does to its chunk, by the functions of its
    config.
    """

    def __init__(self) -> None:
        self._table = SideTable()

    def get(self, about: object, default: _D) -> _T | _D:
        """Return the fact about an object, or the default."""
        fact: _T | _D = self._table.get(about, default)
        return fact

    def get_or_make(self, about: object, make: Callable[[], _T]) -> _T:
        """Return the fact about an object, made now if there is none."""
        fact: _T | None = self._table.get(about)
        if fact is None:
            fact = make()
            self._table.set(about, fact)
        return fact

    def set(self, about: object, fact: _T) -> None:
        """Replace the fact about an object."""
        self._table.set(about, fact)

    def pop(self, about: object, default: _D) -> _T | _D:
        """Remove the fact about an object, and return it, or the default."""
        fact: _T | _D = self._table.pop(about, default)
        return fact
