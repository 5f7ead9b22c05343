"""SkyRL's checkpoints hold the parameters of the last optimizer step.

Symptom   with overlap_param_gather (SkyRL passes it on to Megatron), a checkpoint saved after a step is a mixture
          of new and old parameters, silently: a data-parallel rank writes what it holds, its own shard beside
          those of others, which are one step old.
Upstream  in all releases of skyrl-train and skyrl, and on main. Megatron's own train() gathers before a save.
Seam      MegatronStrategy.save_checkpoint() asks the unwrapped model for its state, out of the reach of
          megatron.gathered-when-read, and so it gathers first. All ranks call it. save_hf_model() and weight syncs
          read through Megatron-Bridge's exporter (mbridge's in skyrl-train 0.2.0), which that patch makes gather.
Limits    AdapterStore, which swaps LoRA adapters, copies the buffers as they are, together with the optimizer's
          state: call `megapatch.weight_sync.gathered_parameters(model)` before swapping. What that refuses to
          gather, such as parameters in an offloaded buffer, save_checkpoint() refuses, too.
Numbers   change in checkpoints only: to those of a run without overlap_param_gather, to the last bit.
Cost      no gather in addition with megatron.gathered-when-read: the forward pass after a save finds nothing left
          to gather.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...patch import ABSENT, FIXED, NEEDED, Patch, Site, Verdict
from .._diagnosis import lacking, missing_names, missing_parameters
from .._gathered import GATHERS, gathered_before_call
from .pipeline_seed import MODULES, STRATEGY


def diagnose(module: ModuleType) -> Verdict:
    """Read the real method: running it writes a checkpoint."""
    if not hasattr(module, STRATEGY):
        return Verdict(ABSENT, f"this version has no {STRATEGY}")
    save = f"{module.__name__}:{STRATEGY}.save_checkpoint"
    missing = [*missing_parameters(save, "model"), *missing_names(save, "actor_module", "sharded_state_dict")]
    if missing:
        return lacking(missing)
    if len(missing_names(save, *GATHERS)) < len(GATHERS):
        return Verdict(FIXED, "save_checkpoint() gathers the parameters that it reads")
    return Verdict(NEEDED, "with overlap_param_gather save_checkpoint() reads parameters that are not gathered")


def gather_first(save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(save_checkpoint)

    def model_of(*args: Any, **kwargs: Any) -> Any:
        return list(signature.bind_partial(*args, **kwargs).arguments["model"].actor_module)

    return gathered_before_call(save_checkpoint, model_of)


PATCH = Patch(
    name="skyrl.gathered-when-read",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/RL/pull/4086",
    sites=tuple(
        Site(module=module, diagnose=diagnose, replace={f"{STRATEGY}.save_checkpoint": gather_first})
        for module in MODULES
    ),
    changes_numbers=True,
)
