"""ms-swift skips the step of an fp16 overflow, as Megatron does, and continues.

Symptom   with fp16 training ends in its first step with "found NaN in local grad norm for bucket #0 in backward
          pass" (or "found Inf"): the loss scale begins at 2**32, gradients overflow until it is small enough, and
          ms-swift always checks gradients for NaN. Without that check it would end with "TypeError: must be real
          number, not NoneType": for an overflow Megatron's optimizer answers (False, None, None), and ms-swift
          makes a tensor of that norm.
Upstream  not reported for ms-swift; in 4.0.4 to 4.6.0. verl-project/verl#5369 is verl's. Megatron's own arguments
          switch the check off when the loss scale is dynamic.
Seam      wrap_model(), rebound in the trainer: its result does not check gradients if there is a dynamic loss
          scale, which ms-swift's fp16 always has. And the class attribute train_step(): an overflow's norm is
          infinite, and a WARNING on rank 0 has the new loss scale; `trainer.megapatch_skipped_steps` counts. The
          trainer itself leaves the learning rate where it is after a step that was not taken.
Limits    with fp16 a NaN that no smaller loss scale mends is skipped forever, as in Megatron's own train(): an
          ERROR says so at the smallest. bf16 and fp32 are checked as before.
Cost      once a model, and a comparison in a step.
"""

from __future__ import annotations

import dis
import functools
import inspect
import math
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict, unpatched
from .._diagnosis import StandIn, expect_none, running, unmet, with_globals
from .._overflow import leave_overflows_to_optimizer, overflow_answered

WRAP_MODULE = "swift.megatron.utils.megatron_lm_utils"
WRAP = "wrap_model"
CHECK = "check_for_nan_in_grad"
TRAINER_MODULE = "swift.megatron.trainers.base"
STEP = "BaseMegatronTrainer.train_step"
REDUCE = "reduce_max_stat_across_model_parallel_group"


# ------------------------------------------------------------------------------------------ the check
def diagnose_check(module: ModuleType) -> Verdict:
    """Read the real function: running it takes a GPU."""
    path = f"{module.__name__}:{WRAP}"
    expect_none(*unmet.parameters(path, "args", "models"), *unmet.names(path, "ddp_config", "fp16"))
    if unmet.names(path, CHECK):
        return Verdict(FIXED, f"{WRAP}() leaves {CHECK} off")
    # kwargs["check_for_nan_in_grad"] = True
    found = list(dis.get_instructions(inspect.unwrap(unpatched(getattr(module, WRAP)))))
    place = next(index for index, one in enumerate(found) if one.argval == CHECK)
    if any(one.argval is True for one in found[max(place - 3, 0) : place]):
        return Verdict(NEEDED, f"{WRAP}() checks gradients for NaN whatever the loss scale is")
    return Verdict(UNKNOWN, f"expected {WRAP}() to set {CHECK} to True")


def leave_overflows_to_the_optimizer(wrap_model: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wrap_model)
    def patched_wrap_model(args: Any, *others: Any, **kwargs: Any) -> Any:
        models = wrap_model(args, *others, **kwargs)
        if getattr(args, "fp16", None) is True:
            leave_overflows_to_optimizer(models)
        return models

    return patched_wrap_model


# ------------------------------------------------------------------------------------------ the step
def diagnose_step(module: ModuleType) -> Verdict:
    """Read the real step, and pass an overflow's norm to the function that it calls, without torch."""
    path = f"{module.__name__}:{STEP}"
    expect_none(*unmet.names(path, "optimizer", "step", REDUCE))
    torch = StandIn(
        tensor=lambda values, **ignored: SimpleNamespace(item=functools.partial(float, values[0])),
        cuda=StandIn(current_device=_nothing),
        distributed=StandIn(all_reduce=_nothing, ReduceOp=StandIn()),
    )
    mpu = StandIn(get_model_parallel_group=_nothing)
    with running(REDUCE):
        try:
            with_globals(getattr(module, REDUCE), torch=torch, mpu=mpu, get_current_device=_nothing)(None)
        except TypeError:
            return Verdict(NEEDED, "an fp16 overflow, whose gradient norm is None, ends the job")
    return Verdict(FIXED, f"{REDUCE}() accepts None")


def _nothing(*ignored: Any, **also_ignored: Any) -> None: ...


def accept_overflow(train_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train_step)
    def patched_train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        with overflow_answered(self, (False, math.inf, None)):
            return train_step(self, *args, **kwargs)

    return patched_train_step


PATCH = Patch(
    name="ms_swift.overflow-is-skipped",
    doc=__doc__,
    upstream=None,
    sites=(
        Site(WRAP_MODULE, diagnose_check, replace={WRAP: leave_overflows_to_the_optimizer}),
        Site(TRAINER_MODULE, diagnose_step, replace={STEP: accept_overflow}),
    ),
)
