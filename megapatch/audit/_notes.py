"""Notes that an audit keeps in the objects of Megatron that they are about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")
_D = TypeVar("_D")


class Notes(Generic[_T]):
    """One kind of note of one audit, at most one for each object.

    A note is an attribute of its object: it goes with the object even if it refers to it, which a weak table would
    prevent, and reading it costs one look-up. Notes that an earlier audit has left count for nothing.

    Args:
        name: of the kind.
    """

    def __init__(self, name: str) -> None:
        self._name = f"_megapatch_audit_{name}"

    def get(self, about: Any, default: _D) -> _T | _D:
        """Return the note about an object, or the default."""
        owner, note = vars(about).get(self._name, (None, None))
        return note if owner is self else default

    def get_or_make(self, about: Any, make: Callable[[], _T]) -> _T:
        """Return the note about an object, made now if there is none."""
        noted: tuple[object, _T] | None = about.__dict__.get(self._name)
        if noted is None or noted[0] is not self:
            about.__dict__[self._name] = noted = (self, make())
        return noted[1]

    def set(self, about: Any, note: _T) -> None:
        """Replace the note about an object."""
        vars(about)[self._name] = (self, note)

    def pop(self, about: Any, default: _D) -> _T | _D:
        """Remove the note about an object, and return it, or the default."""
        note = self.get(about, default)
        vars(about).pop(self._name, None)
        return note
