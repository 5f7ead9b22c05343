"""A mixture of experts that has trained is freed when the last reference to it goes.

Symptom   a model with experts that is dropped (a critic, a model that is built again) stays in memory, with its
          DistributedDataParallel, buffers and optimizer, if it has trained once. Its process groups stay, too.
Upstream  NVIDIA/Megatron-LM#2774 shows the growth; in 0.12 to 0.19. The token dispatcher keeps the probabilities
          of its last forward pass. Their graph leads to DistributedDataParallel's hooks, and these to the model: a
          cycle through C++, which Python's garbage collector does not see.
Seam      the method that ends a dispatcher's forward pass: after it the dispatcher keeps the same values, without
          their graph. The forward pass has read them by then, and the backward pass has what it saved.
Limits    after an exception inside of the experts the graph stays until the next forward pass. An fp32 model with
          the distributed optimizer stays for good: its shards are views with a graph. 0.12 is left as it is. The
          flexible dispatcher was not run: it takes a GPU.
Cost      about two microseconds a layer and microbatch.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...patch import FIXED, NEEDED, UNSUPPORTED, Patch, Site, Verdict
from .._diagnosis import codes_of, lacking, resolve

MODULE = "megatron.core.transformer.moe.token_dispatcher"
ALL_TO_ALL = "MoEAlltoAllTokenDispatcher"
CLASSES = (ALL_TO_ALL, "MoEAllGatherTokenDispatcher", "MoEFlexTokenDispatcher")
KEPT = "probs"
END, END_OF_0_12 = "combine_postprocess", "token_unpermutation"
MANAGER = "_comm_manager"  # of the flexible dispatcher, which keeps probabilities of its own


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


PATCH = Patch(
    name="megatron.trained-experts-freed",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/issues/2774",
    sites=(Site(MODULE, diagnose, replace={f"{name}.{END}": let_the_graph_go for name in CLASSES}),),
)
