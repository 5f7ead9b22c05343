"""A model that has trained is freed when the last reference to it goes.

Symptom   a model that is dropped (a critic, a model that is built again) stays in memory, with its
          DistributedDataParallel, buffers and optimizer, if it has experts and has trained once, or if it is fp32
          and its optimizer is distributed. Its process groups stay, too.
Upstream  NVIDIA/Megatron-LM#2774 shows the growth with experts; both in 0.12 to 0.19. The token dispatcher keeps
          the probabilities of its last forward pass, and the optimizer's fp32 shards are views of parameters.
          Their graphs lead to DistributedDataParallel's hooks, and these to the model: a cycle through C++, which
          Python's garbage collector does not see.
Seam      the method that ends a dispatcher's forward pass: after it the dispatcher keeps the same values, without
          their graph. The forward pass has read them by then, and the backward pass has what it saved. And
          get_megatron_optimizer(): after it the optimizer has the same views, detached as those of bf16 are.
          Making it in no_grad mode is not an option: with torch 2.15 its steps would raise.
Limits    after an exception inside of the experts the graph stays until the next forward pass. Experts in 0.12 are
          left as they are, and shards of an offloaded optimizer, or of one that is made without
          get_megatron_optimizer(). The flexible dispatcher was not run: it takes a GPU.
Cost      about two microseconds a layer and microbatch.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._mcore.main_params import children_of
from ...patch import FIXED, NEEDED, UNSUPPORTED, Patch, Site, Verdict
from .._diagnosis import codes_of, lacking, missing_attributes, missing_reads, reads_in_order, resolve

MODULE = "megatron.core.transformer.moe.token_dispatcher"
ALL_TO_ALL = "MoEAlltoAllTokenDispatcher"
CLASSES = (ALL_TO_ALL, "MoEAllGatherTokenDispatcher", "MoEFlexTokenDispatcher")
KEPT = "probs"
END, END_OF_0_12 = "combine_postprocess", "token_unpermutation"
MANAGER = "_comm_manager"  # of the flexible dispatcher, which keeps probabilities of its own

OPTIMIZERS, MAKE = "megatron.core.optimizer", "get_megatron_optimizer"
GROUPS = "shard_fp32_groups"
OFFLOADED = "sub_optimizers"  # of the offloaded optimizer, which finds its copies by shard
SHARDS = f"{OPTIMIZERS}.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups"


def diagnose(module: ModuleType) -> Verdict:
    """Look at what the real all-to-all dispatcher keeps: a pass takes a model."""
    dispatcher = f"{MODULE}:{ALL_TO_ALL}"
    methods = vars(resolve(dispatcher) or object)
    if END_OF_0_12 in methods:
        return Verdict(
            UNSUPPORTED, f"{KEPT} and their graph stay in a release whose {END_OF_0_12}() ends a dispatch"
        )
    kinds = {name: vars(resolve(f"{MODULE}:{name}") or object) for name in CLASSES}
    if missing := [f"{MODULE}:{name}.{END}" for name, kind in kinds.items() if END not in kind]:
        return lacking(missing)
    storing = [name for name in methods if _stores(f"{dispatcher}.{name}")]
    if not storing:
        return Verdict(FIXED, f"{ALL_TO_ALL} keeps no {KEPT}")
    if END in storing:
        return Verdict(FIXED, f"{END}() resets {KEPT}")
    return Verdict(NEEDED, f"{ALL_TO_ALL} keeps {KEPT}, with their graph")


def _stores(path: str) -> bool:
    """Return whether a method sets `self.probs`."""
    instructions = [one for code in codes_of(resolve(path)) for one in dis.get_instructions(code)]
    return any(one.opname == "STORE_ATTR" and one.argval == KEPT for one in instructions)


def let_the_graph_go(end: Callable[..., Any]) -> Callable[..., Any]:
    torch = sys.modules["torch"]

    @functools.wraps(end)
    def patched_end_of_a_dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = end(self, *args, **kwargs)
        for holder in (self, vars(self).get(MANAGER)):
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    vars(holder)[name] = value.detach()
        return result

    return patched_end_of_a_dispatch


def diagnose_shards(module: ModuleType) -> Verdict:
    """Count which views of parameters are detached: those of bf16 parameters are."""
    if missing := [*missing_attributes(f"{OPTIMIZERS}:", MAKE), *missing_reads(SHARDS, "detach", "view")]:
        return lacking(missing)
    if reads_in_order(resolve(SHARDS), "detach")[1:]:
        return Verdict(FIXED, "shards of fp32 parameters have no graph")
    return Verdict(NEEDED, "shards of fp32 parameters are views with a graph")


def detach_shards(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def patched_get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        for optimizer in children_of(made):
            if groups := getattr(optimizer, GROUPS, None):
                _detach(groups, optimizer.optimizer)
        return made

    return patched_get_megatron_optimizer


def _detach(groups: list[list[Any]], inner: Any) -> None:
    """Replace shards that have a graph by the same views without, in these groups and the inner optimizer's."""
    if inner.state or hasattr(inner, OFFLOADED):
        return
    detached = {id(shard): shard.detach() for group in groups for shard in group if shard.grad_fn is not None}
    for group in (*groups, *(group["params"] for group in inner.param_groups)):
        for index, shard in enumerate(group):
            if (other := detached.get(id(shard))) is not None:
                vars(other).update(vars(shard))
                group[index] = other


PATCH = Patch(
    name="megatron.dropped-models-freed",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/issues/2774",
    sites=(
        Site(MODULE, diagnose, replace={f"{name}.{END}": let_the_graph_go for name in CLASSES}),
        Site(OPTIMIZERS, diagnose_shards, replace={MAKE: detach_shards}),
    ),
)
