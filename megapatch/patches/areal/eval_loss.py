"""AReaL's evaluation loss does not depend on how its samples are cut into microbatches.

Symptom   eval_batch() of the same samples is 3.61 with one microbatch, 1.81 with two, 0.90 with four; silently.
Upstream  inclusionAI/AReaL#1273 repairs train_batch(); in 1.0.4. eval_batch() keeps loss.detach() of each
          microbatch, and Megatron divides the loss that it gets, which is the same memory, by their number. The
          losses have weights by then, with which their sum is the mean.
Seam      the class attribute MegatronEngine.eval_batch(): Megatron gets a copy of each loss.
Limits    the log of an evaluation by AReaL's other engines is as before.
Numbers   change in what eval_batch() returns with several microbatches, or with context parallelism, to those of
          one microbatch. Training does not change.
Cost      a copy of a number for each microbatch of an evaluation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._python.dotted import temporarily_set
from ...patch import FIXED, NEEDED, Patch, Site, Verdict
from .._diagnosis import expect_none, reads_in_order, resolve, unmet

MODULE = "areal.engine.megatron_engine"
ENGINE = "MegatronEngine"
RUN = "forward_backward_batch"


def diagnose(module: ModuleType) -> Verdict:
    """Read the real method: running it takes a model."""
    path = f"{module.__name__}:{ENGINE}"
    expect_none(
        *unmet.parameters(f"{path}.{RUN}", "process_output_fn"),
        *unmet.reads(f"{path}.eval_batch", RUN, "detach"),
    )
    if reads_in_order(resolve(f"{path}.eval_batch"), "clone"):
        return Verdict(FIXED, "eval_batch() keeps copies of losses")
    return Verdict(NEEDED, "eval_batch() returns losses that Megatron has divided by the number of microbatches")


def copy_losses(eval_batch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(eval_batch)
    def patched_eval_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = self.forward_backward_batch

        @functools.wraps(run)
        def run_with_copies(
            microbatches: Any, process_output_fn: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> Any:
            return run(microbatches, lambda *given: process_output_fn(*given).clone(), *args, **kwargs)

        with temporarily_set(self, **{RUN: run_with_copies}):
            return eval_batch(self, *args, **kwargs)

    return patched_eval_batch


PATCH = Patch(
    name="areal.eval-loss",
    doc=__doc__,
    upstream="https://github.com/inclusionAI/AReaL/pull/1273",
    changes_numbers=True,
    sites=(Site(MODULE, diagnose, replace={f"{ENGINE}.eval_batch": copy_losses}),),
)
