"""MoE's auxiliary losses have the same weight with context parallel as without.

Symptom   with context parallel, the gradients of the load balancing losses and of the z-loss are too small by the
          context parallel size, silently: moe_aux_loss_coeff acts like a half of it with two ranks. With
          calculate_per_token_loss they are too small by the tensor parallel size, too.
Upstream  NVIDIA/Megatron-LM#2237; in 0.12 to 0.15, repaired in 0.16. Each rank differentiates its own part of
          these losses, and DistributedDataParallel then divides by all data and context parallel ranks.
          With calculate_per_token_loss NVIDIA/Megatron-LM#5047; in 0.12 to 0.18, repaired in 0.19: a router counts
          its own tokens, and what divides by them counts those of all ranks that share a sequence.
Seam      schedules.backward_step: while the original runs, the scale of these losses is that of 0.16, or of 0.19.
          The scale that the schedule has set before stays as it is.
Limits    the sizes are those of parallel_state, not of process groups that are passed on.
          With overlap_moe_expert_parallel_comm (0.14 on) the schedules do not run this.
          With calculate_per_token_loss seq_aux_loss is divided by the micro batch size in 0.16 to 0.18
          (NVIDIA/Megatron-LM#5798, repaired in 0.19): multiply its coefficient by it.
          global_aux_loss takes the tokens of earlier microbatches for those of the last one
          (NVIDIA/Megatron-LM#7197, open; 0.15 on).
Numbers   change with MoE and context parallel, or tensor parallel and calculate_per_token_loss: a coefficient that
          was tuned with a larger value is to be lowered.
Cost      nothing without MoE or these layouts; else a multiplication of one element for each microbatch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict
from .._diagnosis import expect_none, most_urgent, resolve, running, unmet
from ._schedules import MODULE, PACKAGE, PARALLEL, ROUTER, ROUTERS, SCALE, one_microbatch, weight_per_token

SIZES = ("get_context_parallel_world_size", "get_tensor_model_parallel_world_size")


def diagnose(package: ModuleType) -> Verdict:
    """Say what most needs attention of both ways to divide."""
    expect_none(
        *unmet.attributes(f"{MODULE}:", "torch"),
        *unmet.parameters(f"{MODULE}:backward_step", "input_tensor", "output_tensor", "config"),
        *unmet.names(f"{MODULE}:backward_step", "backward"),
        *unmet.names(f"{ROUTERS}:MoEAuxLossAutoScaler.backward", SCALE),
        *unmet.names(f"{ROUTERS}:MoEAuxLossAutoScaler.set_loss_scale", SCALE),
        *unmet.attributes(f"{PARALLEL}:", *SIZES),
        *unmet.attributes(f"{ROUTER}:TopKRouter", "apply_z_loss"),
    )
    return most_urgent(diagnose_microbatches(package), diagnose_tokens(package))


def diagnose_microbatches(package: ModuleType) -> Verdict:
    """Let the real code set the scale of these losses for two context parallel ranks."""
    with running("the loss of a microbatch"):
        one, two = (one_microbatch(resolve(f"{MODULE}:"), 1, cp_size=size).scale for size in (1, 2))
    if (one, two) == (1, 2):
        return Verdict(FIXED, "auxiliary losses are scaled by the context parallel size")
    if (one, two) != (1, 1):
        return Verdict(
            UNKNOWN, f"expected auxiliary losses scaled by 1, or by the context parallel size; by {two}"
        )
    return Verdict(NEEDED, "auxiliary losses are too small by the context parallel size")


def diagnose_tokens(package: ModuleType) -> Verdict:
    """Let the real router attach its z-loss for one of two ranks."""
    with running("apply_z_loss()"):
        weight = weight_per_token(resolve(f"{ROUTER}:TopKRouter.apply_z_loss"), sys.modules["torch"])
    if weight == 2:
        return Verdict(FIXED, "auxiliary losses per token are scaled by the ranks that share a sequence")
    if weight != 1:
        return Verdict(UNKNOWN, f"expected auxiliary losses per token scaled by 1 or 2; by {weight}")
    return Verdict(NEEDED, "auxiliary losses per token are too small by the ranks that share a sequence")


def scale_by_ranks(backward_step: Callable[..., Any]) -> Callable[..., Any]:
    from . import _losses_of_older_schedules  # few have these releases

    package = sys.modules[PACKAGE]
    sizes = {
        False: SIZES[:1] if diagnose_microbatches(package).kind is NEEDED else (),
        True: SIZES if diagnose_tokens(package).kind is NEEDED else (),
    }
    return _losses_of_older_schedules.scale_by_ranks(backward_step, sizes)


PATCH = Patch(
    name="megatron.aux-loss-over-context-parallel",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/2237",
    changes_numbers=True,
    sites=(Site(PACKAGE, diagnose, replace={"schedules.backward_step": scale_by_ranks}),),
)
