"""A checkpoint in the format fully_reshardable has each parameter's own optimizer state.

Symptom   the distributed optimizer saves its state as fully_reshardable from buckets without the padding at their
          ends, and looks for parameters where they are with it. With several buckets (overlap_grad_reduce), one of
          which has padding, parameters of later buckets are saved with others' main parameters and moments,
          silently but for a warning on the last one ("can lead to data corruption"). The next load then trains
          another model. Buckets have padding where their size is not a multiple of 128 and of the data-parallel
          ranks, as with 24 of them.
Upstream  NVIDIA/Megatron-LM#5077, which is in no release up to 0.19.2; the format came with 0.15.
Seam      the class attribute DistributedOptimizer.sharded_param_state_fully_reshardable, around whose original the
          buffers say where their parameters are without padding.
Limits    checkpoints that were saved without the patch stay wrong: a load cannot tell. Load their weights alone.
          Other formats are right: dp_reshardable saves buckets as they are.
Numbers   change in checkpoints, where they were wrong.
Cost      goes through the parameters once in a save.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from ..._python.dotted import temporarily_set
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict, unpatched
from .._diagnosis import StandIn, answering_none, before_release, expect_none, gone, running, unmet

MODULE = "megatron.core.optimizer.distrib_optimizer"
OPTIMIZER = "DistributedOptimizer"
STATES = "sharded_param_state_fully_reshardable"
WHERE = "param_index_map"
"""Of a buffer: by parameter, its first and last element and its bucket."""

_lacking_there = before_release("megatron-core", "0.15")


def diagnose(module: ModuleType) -> Verdict:
    """Let the real method take apart the state of two parameters, in buckets of which the first has padding."""
    expect_none(*unmet.attributes(f"{MODULE}:", OPTIMIZER))
    kind = getattr(module, OPTIMIZER)
    if not hasattr(kind, STATES):
        return gone(f"{OPTIMIZER}.{STATES}", module, _lacking_there)
    expect_none(*unmet.names(f"{MODULE}:{OPTIMIZER}.{STATES}", "buffers", WHERE, "get_parameter_state_dp_zero"))
    with running(f"{STATES}()"):
        found = _state_of_the_second(kind)
    if found == 2.0:
        return Verdict(FIXED, "parameters are looked for where they are without padding")
    if found == 3.0:
        return Verdict(NEEDED, "parameters are looked for where they are with the padding of buckets before them")
    return Verdict(UNKNOWN, f"expected the state 2.0 or, of what comes after it, 3.0; found {found}")


def _state_of_the_second(kind: Any) -> float:
    import torch

    mapping = import_module("megatron.core.dist_checkpointing.mapping")
    first, second = torch.zeros(1), torch.zeros(1)
    optimizer = object.__new__(answering_none(kind))
    states = {"param": torch.tensor([1.0, 2.0, 3.0]), "numel_unpadded": 3}
    vars(optimizer).update(
        gbuf_ranges=[{"dtype": []}],
        buffers=[
            StandIn(
                **{WHERE: {first: (0, 1, 0), second: (2, 3, 1)}},
                buckets=[_bucket(size=2, unpadded=1), _bucket(size=2, unpadded=2)],
                numel_unpadded=3,
            )
        ],
        get_parameter_state_dp_zero=lambda **options: {0: {"dtype": states}},
    )
    model = {
        name: mapping.ShardedTensor.from_rank_offsets(name, parameter)
        for name, parameter in (("first", first), ("second", second))
    }
    found = unpatched(getattr(kind, STATES))(optimizer, model, metadata={})
    return float(found[1]["param"].data)


def _bucket(size: int, unpadded: int) -> StandIn:
    return StandIn(grad_data=StandIn(numel=lambda: size), numel_unpadded=unpadded)


def slice_without_padding(states: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(states)
    def patched_sharded_param_state_fully_reshardable(self: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for buffer in self.buffers:
                stack.enter_context(temporarily_set(buffer, **{WHERE: _without_padding(buffer)}))
            return states(self, *args, **kwargs)

    return patched_sharded_param_state_fully_reshardable


def _without_padding(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """Return where the buffer's parameters would be if no bucket had padding at its end."""
    padding, before = [], 0
    for bucket in buffer.buckets:
        padding.append(before)
        before += bucket.grad_data.numel() - bucket.numel_unpadded
    return {
        parameter: (start - padding[bucket], end - padding[bucket], bucket)
        for parameter, (start, end, bucket) in getattr(buffer, WHERE).items()
    }


PATCH = Patch(
    name="megatron.fully-reshardable-states",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/5077",
    changes_numbers=True,
    sites=(Site(MODULE, diagnose, replace={f"{OPTIMIZER}.{STATES}": slice_without_padding}),),
)
