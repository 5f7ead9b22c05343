"""The chunks that an audit knows, and which of them an optimizer steps."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from .._mcore.bucket_groups import MODULE


class Models:
    """The DistributedDataParallel chunks that an audit knows.

    Attributes:
        chunks: those that were wrapped, or made a forward-backward call, since the audit began; in the same order
            on all ranks.
    """

    def __init__(self) -> None:
        self.chunks: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._stepped_by: weakref.WeakKeyDictionary[Any, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()
        """By optimizer its chunks: weakly, as their config refers to the optimizer and would keep them alive."""

    def add(self, chunks: Iterable[Any]) -> None:
        """Know these chunks from now on."""
        for chunk in chunks:
            self.chunks.setdefault(chunk)

    def stepped_by(self, optimizer: Any) -> list[Any]:
        """Return the chunks whose parameters an optimizer steps."""
        known = [reference() for reference in self._stepped_by.get(optimizer, ())]
        if known and None not in known:
            return known
        found = self._find(optimizer)
        self._stepped_by[optimizer] = [weakref.ref(chunk) for chunk in found]
        return found

    def optimizers_of(self, chunk: Any) -> list[Any]:
        """Return the optimizers that are known to step a chunk, of those that others consist of."""
        return [
            part
            for optimizer, chunks in list(self._stepped_by.items())
            if any(reference() is chunk for reference in chunks)
            for part in optimizers_in(optimizer)
        ]

    def _find(self, optimizer: Any) -> list[Any]:
        parts = optimizers_in(optimizer)
        ddp_class = getattr(sys.modules.get(MODULE), "DistributedDataParallel", None)
        if ddp_class is None:
            return []
        found = {id(chunk): chunk for part in parts for chunk in getattr(part, "model_chunks", ())}
        for part in parts:
            if not hasattr(part, "model_chunks"):
                parameters = {id(parameter) for parameter in _model_parameters(part)}
                found.update(
                    (id(chunk), chunk)
                    for chunk in self.chunks
                    if any(id(parameter) in parameters for parameter in chunk.param_to_bucket_group)
                )
        return [chunk for chunk in found.values() if isinstance(chunk, ddp_class)]


def optimizers_in(optimizer: Any) -> list[Any]:
    """Return the optimizers that an optimizer consists of: itself, if it contains no others."""
    inner = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if inner is None else [part for below in inner for part in optimizers_in(below)]


def grad_buffers(chunks: Iterable[Any]) -> Iterator[Any]:
    """Yield the gradient buffers of chunks, those of experts last."""
    for chunk in chunks:
        yield from getattr(chunk, "buffers", ())
        yield from getattr(chunk, "expert_parallel_buffers", ())


def first_buffer(chunk: Any) -> Any:
    """Return the first gradient buffer of a chunk; None if it has none, as torch's FSDP2."""
    return next(iter(vars(chunk).get("buffers") or ()), None)


def has_router_losses(config: Any) -> bool:
    """Return whether routers of a model have losses of their own, which they add in train() only."""
    coefficients = [getattr(config, f"moe_{loss}_loss_coeff", None) for loss in ("aux", "z")]
    return bool(getattr(config, "num_moe_experts", None)) and any(coefficients)


def _model_parameters(optimizer: Any) -> Iterator[Any]:
    for name in ("float16_groups", "fp32_from_fp32_groups"):
        for group in getattr(optimizer, name, ()):
            yield from group
    for group in optimizer.param_groups:
        yield from group["params"]
