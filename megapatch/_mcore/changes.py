"""The tensors that were changed in place, by torch's own count of changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Changes:
    """The changes of some tensors from now on. Changes made through ``.data`` do not count, as in torch."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._before = [(tensor, count_of(tensor)) for tensor in tensors]

    def made(self) -> list[Any]:
        """Return the tensors that have been changed."""
        return [tensor for tensor, count in self._before if count_of(tensor) != count]


def count_of(tensor: Any) -> int | None:
    """Return how often a tensor was changed in place; None for one of inference_mode(), which counts nothing."""
    return None if tensor.is_inference() else tensor._version
