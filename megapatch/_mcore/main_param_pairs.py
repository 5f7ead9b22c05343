"""The half-precision parameters of an optimizer, side by side with the main parameters in fp32 that it steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Any

from .main_params import GROUPS, SHARDS

_JUDGED_BY = {
    "tied": {"tied"},  # by the first and the last pipeline stage
    "experts": {"experts"},  # by ranks of other places in the dense layers
    "replicated": {"replicated"},  # by all tensor-parallel ranks
    "split": {"split", "replicated", "tied"},
}


def pairs(
    optimizer: Any, choose: Callable[[Any], Iterable[Any]] = chain.from_iterable
) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (parameter, this rank's part of it, the part's main parameter or None) of those in bf16 or fp16.

    Args:
        optimizer: one that does not consist of others.
        choose: returns some of the items of several lists; of equally long ones those in the same places.
    """
    tensor = sys.modules["torch"].Tensor
    if hasattr(optimizer, GROUPS[0]):
        for parameter, main in aligned(optimizer, GROUPS, choose):
            yield parameter, parameter.data, main
        return
    for parameter, shard, main in aligned(optimizer, SHARDS, choose):
        if type(parameter.data) is not tensor:
            continue  # quantized: main parameters are more precise than any rounding of it
        if main is None:  # of a precision-aware optimizer
            main = optimizer.optimizer.state.get(shard, {}).get("master_param")
            main = main if main is not None and main.dtype.itemsize == 4 and main.is_floating_point() else None
        part = optimizer._get_model_param_range_map(parameter)["param"]
        yield parameter, parameter.data.view(-1)[part.start : part.end], main


def stale_pairs(loaded: Collection[tuple[Any, Any, Any]]) -> list[tuple[Any, Any, Any]]:
    """Return the triples of `pairs` whose weights are new, rather than swapped for others and back.

    A pair is new if its main parameter, rounded, differs from the weights; then all pairs of its kind are, because
    with a small learning rate most weights round to the same number for many steps. Ranks cannot ask each other,
    as one may be alone here: a parameter is compared only with others that all of its ranks hold.

    Args:
        loaded: triples of `pairs`. The host waits for their device once, however many there are.
    """
    flags = differing([(part, main) for _, part, main in loaded])
    new = {_kind(parameter) for (parameter, *_), differs in zip(loaded, flags, strict=True) if differs}
    return [triple for triple in loaded if new & _JUDGED_BY[_kind(triple[0])]]


def differing(pairs: Collection[tuple[Any, Any]]) -> list[bool]:
    """Return for each pair whether the second tensor, rounded, differs from the first."""
    if not pairs:
        return []
    torch = sys.modules["torch"]
    flags = [(second.to(first.device, first.dtype) != first).any() for first, second in pairs]
    return list(torch.stack([flag.to(flags[0].device) for flag in flags]).tolist())


def _kind(parameter: Any) -> str:
    """Return which other ranks hold the parameter."""
    if getattr(parameter, "shared_embedding", False):
        return "tied"
    if not getattr(parameter, "allreduce", True):
        return "experts"
    return "split" if getattr(parameter, "tensor_model_parallel", False) else "replicated"


def aligned(
    optimizer: Any, names: Iterable[str], choose: Callable[[Any], Iterable[Any]] = chain.from_iterable
) -> Iterator[tuple[Any, ...]]:
    """Yield some items of the optimizer's lists of lists, side by side; none for Megatron-FSDP and stubs."""
    return zip(*(choose(getattr(optimizer, name, ())) for name in names), strict=True)
