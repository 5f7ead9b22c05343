"""A microbatch in which no token counts has a loss of 0 instead of NaN.

Symptom   a microbatch whose loss mask is all zeros (a filtered rollout, a slice of padding) makes the gradient of
          the whole step NaN: check_for_nan_in_grad raises, with fp16 the step is skipped as an overflow, and in
          bf16 without the check all parameters become NaN.
Upstream  the schedules divide the loss by its number of tokens; up to 0.14. From 0.15 on by 1 at
          least (NVIDIA/Megatron-LM@1aef9f8eff).
Seam      schedules.forward_step, whose forward step function returns the loss function that is wrapped: a
          number of tokens of 0 in its result becomes 1.
Limits    with calculate_per_token_loss nothing is changed: Megatron divides by the step's number of tokens there,
          and not at all if that is 0. A loss function that divides by the number of tokens itself, as one that
          returns two values does, has to see to it itself. With overlap_moe_expert_parallel_comm (0.14) the
          schedules do not run this.
Numbers   change in steps with such a microbatch: with fp16 they are taken, with bf16 they are not NaN.
Cost      a small kernel for each microbatch, without synchronization.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict
from .._diagnosis import expect_none, resolve, running, unmet
from ._schedules import MODULE, PACKAGE, one_microbatch

FORWARD_STEP = f"{MODULE}:forward_step"


def diagnose(package: ModuleType) -> Verdict:
    """Let the real code take the loss of a microbatch without tokens."""
    expect_none(
        *unmet.attributes(f"{MODULE}:", "torch"),
        *unmet.parameters(FORWARD_STEP, "forward_step_func", "config"),
    )
    with running("the loss of a microbatch"):
        loss = one_microbatch(resolve(f"{MODULE}:"), num_tokens=0, cp_size=1).loss
    if math.isnan(loss):
        expect_none(*_not_passed_on(resolve(f"{MODULE}:")))
        return Verdict(NEEDED, "a microbatch without tokens has a loss of NaN")
    if loss == 0:
        return Verdict(FIXED, "a microbatch without tokens has a loss of 0")
    return Verdict(UNKNOWN, f"expected a microbatch without tokens to have a loss of NaN or 0; found {loss}")


def _not_passed_on(schedules: ModuleType) -> list[str]:
    """Return the function that gets the loss function from 0.14 on, if forward_step() does not mention it."""
    name = "forward_step_calc_loss"
    return unmet.names(FORWARD_STEP, name) if hasattr(schedules, name) else []


def count_one_token_at_least(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    from . import _losses_of_older_schedules  # few have these releases

    return _losses_of_older_schedules.count_one_token_at_least(forward_step)


PATCH = Patch(
    name="megatron.zero-tokens",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/commit/1aef9f8eff",
    sites=(Site(PACKAGE, diagnose, replace={"schedules.forward_step": count_one_token_at_least}),),
    changes_numbers=True,
)
