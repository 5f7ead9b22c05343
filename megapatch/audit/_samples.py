"""A few elements of each of a few tensors: cheap to keep from one step to the next, and to compare, unread."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from .._mcore.main_params import has_memory

TENSORS = 16
"""At most this many are looked at, evenly chosen."""
_ELEMENTS = 8
_NEVER = 2**62


def evenly(items: Sequence[Any], most: int = TENSORS) -> list[Any]:
    """Return some of the items, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[index * (len(items) - 1) // (most - 1)] for index in range(most)]


def evenly_of(lists: Sequence[Sequence[Any]], most: int = TENSORS) -> list[Any]:
    """Return some of the items of several lists, as `evenly` does of one, without going through all of them."""
    ends = list(accumulate(map(len, lists)))
    chosen = []
    for index in evenly(range(ends[-1] if ends else 0), most):
        number = bisect_right(ends, index)
        chosen.append(lists[number][index - ends[number]])
    return chosen


def sample_of(tensors: Iterable[Any]) -> dict[Any, Any]:
    """Return, by device and type, a copy of some elements from the middle of each tensor. Waits for nothing.

    Tensors that have no memory now, or that are not plain ones, are left out.
    """
    import torch

    plain = (torch.Tensor, torch.nn.Parameter)
    parts: dict[Any, list[Any]] = {}
    with torch.no_grad():
        for tensor in tensors:
            if type(tensor) in plain and tensor.is_contiguous() and has_memory(tensor):
                size = min(_ELEMENTS, tensor.numel())
                first = tensor.storage_offset() + (tensor.numel() - size) // 2
                part = tensor.as_strided((size,), (1,), first)  # one operation: a step has a hundred
                parts.setdefault((tensor.device, tensor.dtype), []).append(part)
        return {kind: torch.cat(some) for kind, some in parts.items()}


def spread_over(tensor: Any) -> Any:
    """Return a copy of some elements from all over a flat tensor. Waits for nothing."""
    return tensor[:: max(1, tensor.numel() // (TENSORS * _ELEMENTS))].clone()


def differs(before: Any, now: Any) -> Any:
    """Return whether two samples differ in any bit: a tensor. NaN is what it was."""
    import torch

    return (before.view(torch.uint8) != now.view(torch.uint8)).any()


def differences(before: dict[Any, Any], now: dict[Any, Any]) -> list[Any]:
    """Return, as tensors, whether samples of the same tensors differ; nothing of those that have moved since."""
    return [
        differs(sample, now[kind])
        for kind, sample in before.items()
        if kind in now and now[kind].shape == sample.shape
    ]


class Unread:
    """The first step in which tensors of a kind differed: one number on each device, however many steps."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, Any], Any] = {}

    def add(self, what: str, differs: Any, step: int) -> None:
        """Add whether something differs in a step: a tensor."""
        import torch

        now, place = torch.where(differs, step, _NEVER), (what, differs.device)
        before = self._first.get(place)
        self._first[place] = now if before is None else torch.minimum(before, now)

    def read(self) -> Iterator[tuple[str, int]]:
        """Yield the kinds that have differed since the last call, each with its first step. Waits for devices."""
        first, self._first = self._first, {}
        for (what, _), step in first.items():
            if int(step) < _NEVER:
                yield what, int(step)

    def clear(self) -> None:
        """Forget all results."""
        self._first.clear()
