"""The half-precision parameters of an optimizer, side by side with the main parameters in fp32 that it steps."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Any

from .known import OPTIMIZER, is_a

GROUPS = ("float16_groups", "fp32_from_float16_groups")
"""Lists of Float16OptimizerWithFloat16Params."""
SHARDS = ("model_float16_groups", "shard_float16_groups", "shard_fp32_from_float16_groups")
"""Lists of DistributedOptimizer."""

CHILDREN = "chained_optimizers"

_loans = threading.local()
_JUDGED_BY = {
    "tied": {"tied"},  # by the first and the last pipeline stage
    "experts": {"experts"},  # by ranks of other places in the dense layers
    "replicated": {"replicated"},  # by all tensor-parallel ranks
    "split": {"split", "replicated", "tied"},
}


def children_of(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers of a chain, of chains in it too; one that is not a chain is its own only child."""
    chained = vars(optimizer).get(CHILDREN) if is_a(optimizer, OPTIMIZER) else None
    if chained is None:
        yield optimizer
    for child in chained or ():
        yield from children_of(child)


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


@contextlib.contextmanager
def lent_weights() -> Iterator[None]:
    """Take what this thread loads inside for lent, not restored: the optimizer's main parameters stay as they are.

        with lent_weights():
            model.load_state_dict(quantized)  # the next optimizer step keeps its own full precision

    With bf16 and fp16 an optimizer steps main parameters of its own, in fp32, and writes them into the model. Of
    weights that were loaded without optimizer state the patch `megatron.main-params-after-load` cannot always tell
    whether the step should start from them. Inside it asks nothing and says nothing. After a load that should be
    started from call Megatron's ``optimizer.reload_model_params()`` instead.
    """
    before, _loans.under_way = are_lent(), True
    try:
        yield
    finally:
        _loans.under_way = before


def are_lent() -> bool:
    """Return whether what this thread loads now is lent."""
    return getattr(_loans, "under_way", False)


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


def has_memory(tensor: Any) -> bool:
    """Return whether a tensor's storage is there, rather than offloaded by a framework."""
    return bool(tensor.untyped_storage().nbytes()) or not tensor.numel()
