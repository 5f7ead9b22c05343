"""Losses of a model's own that wait to be logged. They are summed up in one place for all models of the process.

A call of a step adds to them. When the losses of a dropped step are taken away, the others stay: those of other
models, and the sums since a log was taken and cleared. Nothing here waits for the device.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from .._python.dotted import find
from .step_state import TRACKERS


class OwnLosses:
    """The losses that the calls of a step have added: the sums as its last call left them, and without them."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Any, Any, Any]] = {}  # by the tensor's id: it, without the step, as left

    @contextlib.contextmanager
    def added_by_call(self) -> Iterator[None]:
        """Record the losses that the body adds, also if it raises."""
        before = {id(tensor): self._without(tensor) for tensor in logged_losses()}
        try:
            yield
        finally:
            for tensor in logged_losses():
                without = before[id(tensor)] if id(tensor) in before else tensor.new_zeros(tensor.shape)
                self._sums[id(tensor)] = (tensor, without, tensor.detach().clone())

    def take_away(self) -> None:
        for tensor in logged_losses():
            if id(tensor) in self._sums:
                tensor.detach().copy_(self._without(tensor))

    def _without(self, tensor: Any) -> Any:
        """Return the sums without those of the step's calls: to the bit, if nobody else has added any.

        Losses are not negative, so sums that are smaller than the last call left them were cleared since. After
        that they have nothing of the step, if they have not grown beyond it again.
        """
        import torch

        if id(tensor) not in self._sums:
            return tensor.detach().clone()
        _, without, left = self._sums[id(tensor)]
        is_left = (tensor == left) | (tensor.isnan() & left.isnan())
        grown = torch.where(tensor < left, tensor, tensor - (left - without))
        return torch.where(is_left, without, grown).detach()


def logged_losses() -> Iterator[Any]:
    """Yield the tensors of all sums."""
    for module, path in TRACKERS:
        yield from _tensors(find(sys.modules.get(module), path))


def _tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif type(value).__module__.endswith(".moe_logging"):
        yield from _tensors(vars(value))
