"""The half-precision parameters of an optimizer, side by side with the main parameters in fp32 that it steps."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

GROUPS = ("float16_groups", "fp32_from_float16_groups")
"""Lists of Float16OptimizerWithFloat16Params."""
SHARDS = ("model_float16_groups", "shard_float16_groups", "shard_fp32_from_float16_groups")
"""Lists of DistributedOptimizer."""


def pairs(optimizer: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (parameter, this rank's part of it, the part's main parameter or None) of those in bf16 or fp16."""
    tensor = sys.modules["torch"].Tensor
    if hasattr(optimizer, GROUPS[0]):
        for parameter, main in aligned(optimizer, GROUPS):
            yield parameter, parameter.data, main
        return
    for parameter, shard, main in aligned(optimizer, SHARDS):
        if type(parameter.data) is not tensor:
            continue  # quantized: main parameters are more precise than any rounding of it
        if main is None:  # of a precision-aware optimizer
            main = optimizer.optimizer.state.get(shard, {}).get("master_param")
            main = main if main is not None and main.dtype.itemsize == 4 and main.is_floating_point() else None
        part = optimizer._get_model_param_range_map(parameter)["param"]
        yield parameter, parameter.data.view(-1)[part.start : part.end], main


def aligned(optimizer: Any, names: Iterable[str]) -> Iterator[tuple[Any, ...]]:
    """Yield what the optimizer's lists of lists hold side by side. Megatron-FSDP and stubs have no such lists."""
    return zip(*(chain.from_iterable(getattr(optimizer, name, ())) for name in names), strict=True)


def has_memory(tensor: Any) -> bool:
    """Return whether a tensor's storage is there, rather than offloaded by a framework."""
    return bool(tensor.untyped_storage().nbytes()) or not tensor.numel()
