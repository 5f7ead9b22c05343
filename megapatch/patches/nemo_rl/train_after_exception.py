"""After an exception in a call of NeMo-RL's worker, the next call is that of a fresh worker.

Symptom   an exception in train() of a Megatron worker (a loss that raises, out of memory, a bad batch), caught by
          the caller, and then the next train(): "UnboundLocalError: losses_reduced", because Megatron's rerun
          machine takes its first pass for the end of the interrupted step; with overlap_grad_reduce, the rest of
          the interrupted reduce. On main also "Timer 'train' is already running", for good: train(),
          get_logprobs() and, on DTensor's first worker, more methods start and stop a timer without `finally`.
Upstream  not reported; in NeMo-RL v0.6.0 and v0.7.0 (the step), main at 7ea279abf (both).
Seam      megatron_forward_backward(), through which every pass of the Megatron policy and value workers goes:
          after an exception, unfinished reduces are waited for and forgotten, and the rerun machine is rewound to
          its state before the step. If the pass was one with gradients, a router's counts are zeroed, and its
          expert bias and losses that wait to be logged are as before it. (The config's hooks need no care: of
          Megatron's schedules only that of virtual stages changes them, which NeMo-RL does not support.)
          Timer.start(): a timer that is running is started again, with a WARNING.
Limits    the step itself is lost: train() zeroes its gradients when it begins. All ranks must have had the
          exception, in the same pass. After one in train(eval_mode=True) with overlap_param_gather, forward
          pre-hooks stay off (from v0.7.0 on): call worker.enable_forward_pre_hook().
          An exception between two passes that leaves the machine inside its step is not seen; one in the optimizer
          leaves the expert bias that finalize has moved, and an fp16 loss scale.
Numbers   change after an exception with a mixture of experts, to those of a worker in which the step never began.
Cost      10 us in a pass with gradients, and with a mixture of experts copies of its biases and logged losses,
          about 0.1 ms on a CPU. Nothing in other passes.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._mcore.bucket_groups import chunks_of, forget_first_step, settle_grad_reduces
from ..._mcore.known import arguments_of, is_model
from ..._mcore.rerun_machine import machine_of_this_process, rewind_interrupted_step
from ..._mcore.step_state import StepState
from ..._version import see
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict, unpatched
from .._diagnosis import expect_none, running, unmet
from ._workers import names_in

TRAIN, TIMER = "nemo_rl.models.megatron.train", "nemo_rl.utils.timer"
FORWARD_BACKWARD = "megatron_forward_backward"

logger = logging.getLogger("megapatch")


def diagnose(module: ModuleType) -> Verdict:
    """Look whether the real function, or one within it, mentions the rerun machine."""
    expect_none(*unmet.parameters(f"{TRAIN}:{FORWARD_BACKWARD}", "model"))
    if any("rerun" in name.lower() for name in names_in(module, FORWARD_BACKWARD)):
        return Verdict(UNKNOWN, f"expected {FORWARD_BACKWARD}() to leave the rerun machine alone; it mentions it")
    return Verdict(NEEDED, f"{FORWARD_BACKWARD}() leaves the rerun machine inside a step that raised")


def diagnose_timer(module: ModuleType) -> Verdict:
    """Start a real timer twice."""
    expect_none(*unmet.names(f"{TIMER}:Timer.start", "_start_times"))
    with running("Timer.start()"):
        timer, start = module.Timer(), unpatched(module.Timer.start)
        start(timer, "megapatch")
    try:
        start(timer, "megapatch")
    except ValueError:
        return Verdict(NEEDED, "a timer that a call has left running can never be started again")
    return Verdict(FIXED, "a timer that is running can be started again")


def with_a_clean_end(megatron_forward_backward: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(megatron_forward_backward)

    @functools.wraps(megatron_forward_backward)
    def patched_megatron_forward_backward(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_model(model if isinstance(model, list) else [model]):
            return megatron_forward_backward(model, *args, **kwargs)
        chunks = chunks_of(model) or []
        # A pass without gradients may come while a split step is open, whose counts are not its own.
        trains = not arguments_of(signature, (model, *args), kwargs).get("forward_only", False)
        state = StepState(chunks) if trains else None
        try:
            return megatron_forward_backward(model, *args, **kwargs)
        except BaseException:
            for chunk in chunks:
                settle_grad_reduces(chunk)
                forget_first_step(chunk)
            if state is not None:
                state.put_back()
            if (machine := machine_of_this_process()) is not None:
                rewind_interrupted_step(machine)
            raise

    return patched_megatron_forward_backward


def also_when_running(start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def patched_start(self: Any, label: str, *args: Any, **kwargs: Any) -> Any:
        if self._start_times.pop(label, None) is not None:
            logger.warning(
                "timer %r was still running, probably since a call that raised: it is started again"
                + see("timer"),
                label,
            )
        return start(self, label, *args, **kwargs)

    return patched_start


PATCH = Patch(
    name="nemo_rl.train-after-exception",
    doc=__doc__,
    upstream=None,
    sites=(
        Site(TRAIN, diagnose, replace={FORWARD_BACKWARD: with_a_clean_end}),
        Site(TIMER, diagnose_timer, replace={"Timer.start": also_when_running}),
    ),
    changes_numbers=True,
)
