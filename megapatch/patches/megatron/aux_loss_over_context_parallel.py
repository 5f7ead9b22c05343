"""MoE's auxiliary losses have the same weight with context parallel as without.

Symptom   with context parallel, the gradients of the load balancing losses and of the z-loss are too small by the
          context parallel size, silently: moe_aux_loss_coeff acts like a half of it with two ranks.
Upstream  NVIDIA/Megatron-LM#2237; in 0.12 to 0.15, repaired in 0.16. Each rank differentiates its own part of
          these losses, and DistributedDataParallel then divides by all data and context parallel ranks.
Seam      schedules.backward_step: while the original runs, the scale of these losses is that of 0.16. The scale
          that the schedule has set before stays as it is.
Limits    with calculate_per_token_loss nothing is changed, as in 0.16. The size is that of parallel_state, not of
          process groups that are passed on. With overlap_moe_expert_parallel_comm (0.14, 0.15) the schedules
          do not run this.
Numbers   change with context parallel and MoE: a coefficient that was tuned with a larger value is to be lowered.
Cost      nothing without MoE or context parallel; else a multiplication of one element for each microbatch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._python.dotted import temporarily_set
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict
from .._diagnosis import cannot_run, lacking, missing_attributes, missing_names, missing_parameters
from ._schedules import MODULE, PACKAGE, one_microbatch

ROUTERS = "megatron.core.transformer.moe.moe_utils"
PARALLEL = "megatron.core.parallel_state"
SCALE = "main_loss_backward_scale"


def diagnose(package: ModuleType) -> Verdict:
    """Let the real code set the scale of these losses for two context parallel ranks."""
    missing = [
        *missing_attributes(f"{MODULE}:", "torch"),
        *missing_parameters(f"{MODULE}:backward_step", "input_tensor", "output_tensor", "config"),
        *missing_names(f"{ROUTERS}:MoEAuxLossAutoScaler.backward", SCALE),
        *missing_attributes(f"{PARALLEL}:", "get_context_parallel_world_size"),
    ]
    if missing:
        return lacking(missing)
    try:
        one, two = (one_microbatch(package.schedules, num_tokens=1, cp_size=size).scale for size in (1, 2))
    except Exception as error:
        return cannot_run("the loss of a microbatch", error)
    if (one, two) == (1, 2):
        return Verdict(FIXED, "auxiliary losses are scaled by the context parallel size")
    if (one, two) != (1, 1):
        return Verdict(
            UNKNOWN, f"expected auxiliary losses scaled by 1, or by the context parallel size; by {two}"
        )
    if missing := [
        *missing_parameters(f"{MODULE}:backward_step", "model_type"),  # gone in 0.16
        *missing_names(f"{MODULE}:backward_step", "backward"),
        *missing_names(f"{ROUTERS}:MoEAuxLossAutoScaler.set_loss_scale", SCALE),
    ]:
        return lacking(missing)
    return Verdict(NEEDED, "auxiliary losses are too small by the context parallel size")


def scale_by_context_parallel(backward_step: Callable[..., Any]) -> Callable[..., Any]:
    routers, parallel = sys.modules[ROUTERS], sys.modules[PARALLEL]

    @functools.wraps(backward_step)
    def patched_backward_step(
        input_tensor: Any,
        output_tensor: Any,
        output_tensor_grad: Any,
        model_type: Any,
        config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        values = (input_tensor, output_tensor, output_tensor_grad, model_type, config)
        has_experts = isinstance(getattr(config, "num_moe_experts", None), int)
        if not has_experts or getattr(config, "calculate_per_token_loss", False):
            return backward_step(*values, *args, **kwargs)
        size = parallel.get_context_parallel_world_size()
        scale = routers.MoEAuxLossAutoScaler.main_loss_backward_scale
        if size == 1 or scale is None:
            return backward_step(*values, *args, **kwargs)
        with temporarily_set(routers.MoEAuxLossAutoScaler, **{SCALE: scale * size}):
            return backward_step(*values, *args, **kwargs)

    return patched_backward_step


PATCH = Patch(
    name="megatron.aux-loss-over-context-parallel",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/2237",
    changes_numbers=True,
    sites=(Site(PACKAGE, diagnose, replace={"schedules.backward_step": scale_by_context_parallel}),),
)
