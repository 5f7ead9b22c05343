"""verl skips the step of an fp16 overflow, as Megatron does, and continues.

Symptom   with fp16, "NotImplementedError: Megatron optimizer step failed. This should not happen" ends the job at
          the first gradient that overflows, at a loss scale of 32768 to begin with. Megatron's optimizer has
          answered (False, None, None): it took no step, and the next one has a smaller loss scale.
Upstream  verl-project/verl#5369 (open); in 0.6.1 to 0.9.1 and on main. verl's FSDP engine skips such a step.
Seam      class attributes of MegatronEngine. While optimizer_step() runs, the optimizer answers an overflow with
          success and a gradient norm of infinity; verl's FSDP engine reports the same.
          lr_scheduler_step() leaves the learning rate where it is if all steps since the last call were skipped.
          A WARNING on rank 0 has the new loss scale, `engine.megapatch_skipped_steps` the count.
Limits    steps whose gradients overflow at every loss scale are skipped forever, as in Megatron's own train(): an
          ERROR says so at the smallest. Another answer of the optimizer than (False, None, None) fails
          as before. Not the older MegatronPPOActor and MegatronPPOCritic of 0.6.1 and 0.7.1.
Cost      a comparison in a step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..._mcore.side_table import SideTable
from ...patch import FIXED, NEEDED, Patch, Site, Verdict, unpatched
from .._diagnosis import expect_none, running, unmet
from .._overflow import OVERFLOW, overflow_answered, standing_still

MODULE = "verl.workers.engine.megatron.transformer_impl"
ENGINE = "MegatronEngine"
_TAKEN, _SKIPPED = SideTable(), SideTable()
"""Of an engine, how many steps since the last call of its scheduler."""


def diagnose(module: ModuleType) -> Verdict:
    """Call the real method with an optimizer that has found an overflow."""
    path = f"{module.__name__}:{ENGINE}"
    expect_none(
        *unmet.attributes(path, "optimizer_step"),
        *unmet.names(f"{path}.lr_scheduler_step", "lr_scheduler", "step"),
    )
    optimizer = SimpleNamespace(step=lambda: OVERFLOW)
    with running("optimizer_step"):
        try:
            unpatched(getattr(module, ENGINE).optimizer_step)(SimpleNamespace(optimizer=optimizer))
        except NotImplementedError:
            return Verdict(NEEDED, "an fp16 overflow, after which Megatron takes no step, ends the job")
    return Verdict(FIXED, "optimizer_step() accepts that Megatron took no step")


def accept_overflow(optimizer_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(optimizer_step)
    def patched_optimizer_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        with overflow_answered(self, (True, math.inf, None)) as skipped:
            norm = optimizer_step(self, *args, **kwargs)
        steps = _SKIPPED if skipped else _TAKEN
        steps.set(self, steps.get(self, 0) + 1)
        return norm

    return patched_optimizer_step


def stay_without_steps(lr_scheduler_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(lr_scheduler_step)
    def patched_lr_scheduler_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        taken, skipped = _TAKEN.pop(self, 0), _SKIPPED.pop(self, 0)
        if taken or not skipped:
            return lr_scheduler_step(self, *args, **kwargs)
        with standing_still(self.lr_scheduler):
            return lr_scheduler_step(self, *args, **kwargs)

    return patched_lr_scheduler_step


PATCH = Patch(
    name="verl.overflow-is-skipped",
    doc=__doc__,
    upstream="https://github.com/verl-project/verl/pull/5369",
    sites=(
        Site(
            MODULE,
            diagnose,
            replace={
                f"{ENGINE}.optimizer_step": accept_overflow,
                f"{ENGINE}.lr_scheduler_step": stay_without_steps,
            },
        ),
    ),
)
