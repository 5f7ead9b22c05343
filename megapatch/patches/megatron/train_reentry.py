"""megatron.training.training.train() can be called again in the same process.

Symptom   a second train() dies on "When overlap_grad_reduce is True, config.no_sync_func must be None" (the
          first call has left its own no_sync there), or, in every configuration, on "timer has already been
          started" ('interval-time' is started at entry and never stopped). After an exception the first
          call leaves more behind: config hooks, a rerun state machine that is stuck in the middle of a
          step, parameters that were stepped but not gathered, running timers. An exception in evaluate(), called
          from a loop of one's own, too, leaves the machine switched off, the model in eval() and timers running;
          the next evaluation dies on those. With overlap_param_gather, a first call after a step of the caller's
          own trains on weights that are half one step old, silently.
Upstream  unfixed in 0.12 to 0.19 and on main; reported for a copy of this function in THUDM/slime#1779.
Seam      the module function, rebound where others hold it by name. State is corrected around the call: a
          copy of the body would have to follow every release. At entry, a no_sync_func that is a model chunk's own
          no_sync is removed (a user's meets Megatron's assertion as before). In a repeated call the timer is
          stopped, without the time between the calls, reduces left under way are waited for, and parameters not
          gathered since the last step are gathered before the forward pre-hooks go; in a first call those of a
          caller's own steps are.
          On return all is as Megatron leaves it: pretrain() stops the running timer before its last save.
          After an exception the config's hooks are as at entry, timers started by the call are stopped, except
          'interval-time', the rerun state machine is as before the interrupted step, in its old mode, and the next
          forward pass gathers all parameters that are not gathered.
          evaluate() is replaced as well: after an exception the machine, the mode of each module and the timers
          are as it found them. And train_step(): if it raises before the optimizer has stepped, a router's counts
          and expert bias, losses that wait to be logged, and the fp16 loss scale are as before the step.
Limits    needs megatron.forward-pre-hook where overlap_param_gather is on.
          The promises for exceptions hold when it was raised on all ranks: if it was raised on one rank only,
          the others wait for it in a collective, as without megapatch. With pipeline parallelism a stage that
          waits for another stage's message is such a rank.
          With reuse_grad_buf_for_mxfp8_param_ag, parameters that an exception has left stepped but not gathered
          cannot be gathered: the next call raises MegapatchError.
          Some things remain the caller's: args.iteration is read at entry and never written, so set it (and
          args.train_iters) between calls; --manual-gc leaves Python's garbage collector off after the call.
          Microbatches that the interrupted step drew are gone.
          An exception in the optimizer that comes once it has begun to change parameters cannot be undone.
Numbers   change in a first call with overlap_param_gather after steps of the caller's own, to those of gathered
          weights; and after an exception, to those of a process in which the interrupted step never began.
Cost      once a call, a look at the config, the timer and the bucket groups. In a step of a dense model 10 us, and
          with a mixture of experts copies of its biases and logged losses, about 0.1 ms on a CPU; no wait for a
          device.

The site of megatron.train-reentry for Megatron-Bridge's own train().

Symptom   a second train() dies on "timer has already been started", and with overlap_param_gather on a KeyError
          with the model's repr. An exception leaves the same behind as in Megatron's train(); an exception in
          evaluation also leaves its timer running, and the next evaluation dies on that.
          From 0.6 on, with an MXFP8 recipe, a second call behaves as if it resumed from a checkpoint,
          where the forward pre-hooks are on. They are off, and parameters are never gathered again.
Upstream  unfixed in 0.3 to 0.6; the resume came with NVIDIA-NeMo/Megatron-Bridge#5066.
Seam      the module function, rebound where pretrain holds it by name. As for Megatron's train(), except where
          Bridge differs: the config's hooks were set in setup, once for all calls, and stay; timers are those of
          the global state; and at entry of a repeated call the forward pre-hooks are on, as setup leaves them.
Limits    as for Megatron's, but no other patch is needed. With reuse_grad_buf_for_mxfp8_param_ag and
          overlap_param_gather a repeated call raises MegapatchError: parameters and gradients would be mixed up.
          Bridge counts the iteration (global_state.train_state.step), and the caller raises the limit
          (cfg.train.train_iters). Where an exit condition is met, train() still ends in sys.exit().
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._mcore.known import CONFIG, arguments_of, is_a, is_model
from ..._mcore.rerun_machine import rewind_interrupted_step
from ...patch import NEEDED, Patch, Site, Verdict
from .._diagnosis import expect_none, unmet
from ._around_train import (
    INTERVAL_TIMER,
    NO_SYNC_ASSERTION,
    finish_earlier_call,
    gather_other_steps,
    leaving_nothing_if_dropped,
    missing_of_timers_and_machine,
    rerun_machine_restored,
    stop_interval_timer,
    timed_call,
    timers_stopped,
    without_own_no_sync,
)

MODULE = "megatron.training.training"


def diagnose(module: ModuleType) -> Verdict:
    """Read the real function: running it needs a process group, a model and half of Megatron's globals."""
    train = f"{MODULE}:train"
    expect_none(
        *unmet.parameters(train, "model", "config"),
        *unmet.parameters(f"{MODULE}:train_step", "model", "optimizer"),
        *unmet.parameters(f"{MODULE}:evaluate", "model"),
        *unmet.names(f"{MODULE}:evaluate", "get_rerun_state_machine", "set_mode", "eval"),
        *unmet.reads(train, "no_sync_func"),
        *unmet.names(train, NO_SYNC_ASSERTION, INTERVAL_TIMER),
        *unmet.attributes(f"{MODULE}:", "get_timers", "get_rerun_state_machine"),
        *missing_of_timers_and_machine(),
    )
    return Verdict(
        NEEDED, f"train() asserts that {NO_SYNC_ASSERTION}, and never stops the {INTERVAL_TIMER} timer it starts"
    )


def make_reentrant(train: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(train)
    training = sys.modules[train.__module__]
    trained: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(train)
    def patched_train(*args: Any, **kwargs: Any) -> Any:
        call = arguments_of(signature, args, kwargs)
        model, config = call.get("model"), call.get("config")
        if not is_model(model) or not is_a(config, CONFIG):
            return train(*args, **kwargs)
        timers, machine = training.get_timers(), training.get_rerun_state_machine()

        # An earlier call, patched or not, has started the timer, unless Megatron's globals are new since then.
        if INTERVAL_TIMER in timers._timers or any(chunk in trained for chunk in model):
            stop_interval_timer(timers)
            rewind_interrupted_step(machine)
            finish_earlier_call(model)
        gather_other_steps(model)
        trained.update(model)
        with timed_call(timers), rerun_machine_restored(machine), without_own_no_sync(config, model):
            return train(*args, **kwargs)

    return patched_train


def leaving_nothing_of_evaluation(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap evaluate(), which puts the machine, modes and timers back at its end only."""
    signature = inspect.signature(evaluate)
    training = sys.modules[evaluate.__module__]

    @functools.wraps(evaluate)
    def patched_evaluate(*args: Any, **kwargs: Any) -> Any:
        model = arguments_of(signature, args, kwargs).get("model")
        if not is_model(model):
            return evaluate(*args, **kwargs)
        modes = [(module, module.training) for chunk in model for module in chunk.modules()]
        try:
            with timers_stopped(training.get_timers()), rerun_machine_restored(training.get_rerun_state_machine()):
                return evaluate(*args, **kwargs)
        except BaseException:
            for module, mode in modes:
                module.training = mode
            raise

    return patched_evaluate


def _of_bridge(name: str, found: Any) -> Any:
    """Call a function of the module for Megatron-Bridge, which is loaded only then: few have Bridge."""
    from . import _train_reentry_of_bridge

    return getattr(_train_reentry_of_bridge, name)(found)


PATCH = Patch(
    name="megatron.train-reentry",
    doc=__doc__,
    upstream="https://github.com/THUDM/slime/issues/1779",
    sites=(
        Site(
            MODULE,
            diagnose,
            replace={
                "train": make_reentrant,
                "train_step": leaving_nothing_if_dropped,
                "evaluate": leaving_nothing_of_evaluation,
            },
        ),
        Site(
            "megatron.bridge.training.train",
            functools.partial(_of_bridge, "diagnose"),
            replace={
                "train": functools.partial(_of_bridge, "make_reentrant"),
                "train_step": leaving_nothing_if_dropped,
            },
        ),
    ),
    changes_numbers=True,
)
