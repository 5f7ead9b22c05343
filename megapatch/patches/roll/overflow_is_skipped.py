"""ROLL skips the step of an fp16 overflow, as Megatron does, and continues.

Symptom   with fp16, "NotImplementedError: megatron optimizer step failed!" ends the job at the first gradient
          that overflows; before that the check for NaN in gradients, which ROLL leaves on, does. Megatron's
          optimizer has answered (False, None, None): it took no step, and the next one has a smaller loss scale.
Upstream  not reported for ROLL; in 0.3.0 and on main at 8eb27cc2. verl-project/verl#5369 is verl's.
Seam      the class attribute MegatronTrainStrategy.train_step(). While it runs, the optimizer answers an overflow
          with success and an infinite gradient norm, and the scheduler stays where it is. With fp16 gradients are
          not checked for NaN before the optimizer does. A WARNING on rank 0 has the new loss scale,
          `strategy.megapatch_skipped_steps` the count.
Limits    steps whose gradients overflow at every loss scale are skipped forever, as in Megatron's own train(): an
          ERROR says so at the smallest. bf16 and fp32 are checked as before, and another failure of the optimizer
          fails as before.
Cost      a comparison in a step.
"""

from __future__ import annotations

import dis
import functools
import itertools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._python.dotted import temporarily_set
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict
from .._diagnosis import codes_of, expect_none, unmet
from .._overflow import leave_overflows_to_optimizer, overflow_answered

MODULE = "roll.distributed.strategy.megatron_strategy"
STRATEGY = "MegatronTrainStrategy"


def diagnose(module: ModuleType) -> Verdict:
    """Read the real method: running it takes a model."""
    path = f"{module.__name__}:{STRATEGY}"
    expect_none(
        *unmet.names(f"{path}.train_step", "optimizer", "step", "scheduler"),
        *unmet.names(f"{path}.initialize", "models_wrapped", "megatron_train_args", "fp16"),
    )
    if not unmet.names(f"{path}.train_step", "NotImplementedError"):
        return Verdict(NEEDED, "an fp16 overflow, after which Megatron takes no step, ends the job")
    train_step = getattr(module, STRATEGY).train_step
    instructions = itertools.chain.from_iterable(map(dis.get_instructions, codes_of(train_step)))
    if any(instruction.opname == "RAISE_VARARGS" for instruction in instructions):
        return Verdict(
            UNKNOWN, "expected train_step() to raise NotImplementedError, or nothing; it raises another"
        )
    return Verdict(FIXED, "train_step() accepts that Megatron took no step")


def accept_overflow(train_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train_step)
    def patched_train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.megatron_train_args.fp16:
            return train_step(self, *args, **kwargs)
        leave_overflows_to_optimizer(self.models_wrapped)
        step = self.scheduler.step
        with overflow_answered(self, (True, math.inf, None)) as skipped:

            def stay_if_skipped(*args: Any, **kwargs: Any) -> Any:
                return None if skipped else step(*args, **kwargs)

            with temporarily_set(self.scheduler, step=stay_if_skipped):
                return train_step(self, *args, **kwargs)

    return patched_train_step


PATCH = Patch(
    name="roll.overflow-is-skipped",
    doc=__doc__,
    upstream=None,
    sites=(Site(MODULE, diagnose, replace={f"{STRATEGY}.train_step": accept_overflow}),),
)
