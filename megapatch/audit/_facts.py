"""Notes that an audit keeps about objects of Megatron."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from .._mcore.side_table import SideTable

_T = TypeVar("_T")
_D = TypeVar("_D")


class Notes(Generic[_T]):
    """One kind of note of one audit, at most one for each object, and gone with the object or the audit.

    A note must not refer to its object, nor to what does: a module does to its chunk, by the functions of its
    config.
    """

    def __init__(self) -> None:
        self._table = SideTable()

    def get(self, about: object, default: _D) -> _T | _D:
        """Return the note about an object, or the default."""
        note: _T | _D = self._table.get(about, default)
        return note

    def get_or_make(self, about: object, make: Callable[[], _T]) -> _T:
        """Return the note about an object, made now if there is none."""
        note: _T | None = self._table.get(about)
        if note is None:
            note = make()
            self._table.set(about, note)
        return note

    def set(self, about: object, note: _T) -> None:
        """Replace the note about an object."""
        self._table.set(about, note)

    def pop(self, about: object, default: _D) -> _T | _D:
        """Remove the note about an object, and return it, or the default."""
        note: _T | _D = self._table.pop(about, default)
        return note
