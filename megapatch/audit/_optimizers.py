"""What an optimizer of Megatron's consists of, and the chunks whose parameters it steps."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

from .._mcore.bucket_groups import MODULE

DDPS: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
"""The DistributedDataParallel chunks that were wrapped since the audit began, in the same order on all ranks."""


_found: weakref.WeakKeyDictionary[Any, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()
"""By optimizer its chunks: weakly, as their config refers to the optimizer, and would keep all of them alive."""


def ddps_of(optimizer: Any) -> list[Any]:
    """Return the DistributedDataParallel chunks whose parameters an optimizer steps."""
    known = [reference() for reference in _found.get(optimizer, ())]
    if known and None not in known:
        return known
    found = _find_ddps(optimizer)
    _found[optimizer] = [weakref.ref(ddp) for ddp in found]
    return found


def _find_ddps(optimizer: Any) -> list[Any]:
    parts = parts_of(optimizer)
    ddp_class = getattr(sys.modules.get(MODULE), "DistributedDataParallel", None)
    if ddp_class is None:
        return []
    found = {id(chunk): chunk for part in parts for chunk in getattr(part, "model_chunks", ())}
    for part in parts:
        if not hasattr(part, "model_chunks"):
            parameters = {id(parameter) for parameter in _model_parameters(part)}
            found.update(
                (id(ddp), ddp)
                for ddp in DDPS
                if any(id(parameter) in parameters for parameter in ddp.param_to_bucket_group)
            )
    return [chunk for chunk in found.values() if isinstance(chunk, ddp_class)]


def parts_of(optimizer: Any) -> list[Any]:
    """Return the optimizers that an optimizer consists of: itself, if it contains no others."""
    inner = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if inner is None else [part for one in inner for part in parts_of(one)]


def _model_parameters(optimizer: Any) -> Iterator[Any]:
    for name in ("float16_groups", "fp32_from_fp32_groups"):
        for group in getattr(optimizer, name, ()):
            yield from group
    for group in optimizer.param_groups:
        yield from group["params"]
