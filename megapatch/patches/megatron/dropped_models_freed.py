"""A model that has trained is freed when the last reference to it goes.

Symptom   a dropped model (a critic, or one that is built again) stays in memory, with its DistributedDataParallel,
          buffers, optimizer and process groups. Two kinds do: models with experts, once they have trained, and
          fp32 models with a distributed optimizer.
Upstream  NVIDIA/Megatron-LM#2774 shows the growth with experts; both in 0.12 to 0.19. The token dispatcher keeps
          the probabilities of its last forward pass, and the optimizer's fp32 shards are views of parameters.
          Their graphs lead to DistributedDataParallel's hooks on gradients, and these to the model: a cycle
          through C++, which Python's garbage collector does not see.
Seam      the method that makes these hooks: the closure of each, and of hooks in it, refers weakly to its
          DistributedDataParallel. Everything else stays as it is: cutting the graphs instead would change the
          optimizer's shards, and take gradients from a loss on the probabilities that a dispatcher keeps.
Limits    models of FSDP have other hooks, and are left as they are.
          Megatron caches the tables of rotary embeddings with their modules. With overlap_param_gather such a
          model stays until RotaryEmbedding.forward.cache_clear() is called, or megatron.groups-destroyed does it,
          as the next layout is set up.
Numbers   change where a DistributedDataParallel is dropped between a forward and its backward pass: its hooks go
          with it, and add nothing to main_grad.
Cost      0.1 us a parameter in each backward pass.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any

from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict, unpatched
from .._diagnosis import StandIn, expect_none, running, unmet

MODULE = "megatron.core.distributed.distributed_data_parallel"
DDP = "DistributedDataParallel"
MAKE = "_make_backward_post_hook"


def diagnose(module: ModuleType) -> Verdict:
    """Make a hook for a stand-in, drop the stand-in, and see whether the hook keeps it."""
    expect_none(*unmet.reads(f"{MODULE}:{DDP}.{MAKE}", "param_to_bucket_group", "main_grad"))
    ddp = StandIn()
    owner = weakref.ref(ddp)
    with running(f"{MAKE}()"):
        hook = unpatched(getattr(vars(module)[DDP], MAKE))(ddp, None)
    found = bool(list(_cells_of(hook, ddp)))
    del ddp
    if owner() is None:
        return Verdict(FIXED, "hooks on gradients do not keep their model")
    if not found:
        return Verdict(UNKNOWN, f"expected the hook that {MAKE}() makes to have its owner in its closure")
    return Verdict(NEEDED, "hooks on gradients keep their model, and graphs keep the hooks")


def refer_weakly(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def patched_make_backward_post_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook, owner = make(self, *args, **kwargs), weakref.ref(self)
        for cell in _cells_of(hook, self):
            cell.cell_contents = weakref.proxy(self)

        @functools.wraps(hook)
        def patched_hook(*unused: Any) -> Any:
            return None if owner() is None else hook(*unused)

        return patched_hook

    return patched_make_backward_post_hook


def _cells_of(function: Any, owner: Any) -> Iterator[CellType]:
    """Yield the cells of a function's closure that hold this object, and those of functions in there."""
    for cell in getattr(function, "__closure__", None) or ():
        if cell.cell_contents is owner:
            yield cell
        elif isinstance(cell.cell_contents, FunctionType):
            yield from _cells_of(cell.cell_contents, owner)


PATCH = Patch(
    name="megatron.dropped-models-freed",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/issues/2774",
    sites=(Site(MODULE, diagnose, replace={f"{DDP}.{MAKE}": refer_weakly}),),
    changes_numbers=True,
    leaves=((f"{DDP}.{MAKE}", "the hooks that it makes hold their DistributedDataParallel weakly"),),
)
