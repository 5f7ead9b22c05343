"""The site of megatron.train-reentry for Megatron-Bridge's own train().

Symptom   a second train() dies on "timer has already been started", and with overlap_param_gather on a KeyError
          with the model's repr. After an exception the rest of what Megatron's train() leaves behind is left
          here, too; and an exception in evaluation leaves its timer running, which the next evaluation dies on.
          From 0.6 on, with an MXFP8 recipe, a second call takes itself for one that resumes from a checkpoint,
          where the forward pre-hooks are on. They are not, and nobody gathers parameters any more.
Upstream  unfixed in 0.3 to 0.6; the resume came with NVIDIA-NeMo/Megatron-Bridge#5066.
Seam      the module function, rebound where pretrain holds it by name. As for Megatron's train(), with what
          differs in Bridge: the config's hooks were set in setup, once for all calls, and stay; timers are the
          global state's; at entry of a repeated call the forward pre-hooks are on, as setup leaves them; and
          optimizer.step, which train() wraps anew in each call where optimizer_cuda_graph is on, is put back.
Limits    as for Megatron's, but no other patch is needed. With reuse_grad_buf_for_mxfp8_param_ag and
          overlap_param_gather a repeated call raises MegapatchError: up to 0.5 train() ends by gathering
          parameters from what are gradients by then, from 0.6 on it would begin gradients from parameters.
          The iteration is Bridge's to count (global_state.train_state.step), and the caller's to raise
          (cfg.train.train_iters). Where an exit condition is met, train() still ends in sys.exit().
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from ..._mcore.bucket_groups import DDP
from ..._mcore.rerun_machine import BEFORE_STEP, rewind_interrupted_step
from ...errors import MegapatchError
from ...patch import ABSENT, NEEDED, Site, Verdict
from .._diagnosis import lacking, missing_attributes, missing_names, missing_parameters
from ._around_train import (
    INTERVAL_TIMER,
    config_hooks_restored,
    ddp_chunks,
    finish_earlier_call,
    make_warn_once,
    rerun_machine_restored,
    stop_interval_timer,
    timers_stopped,
)

MODULE = "megatron.bridge.training.train"
TRAIN = f"{MODULE}:train"


def diagnose(module: ModuleType) -> Verdict:
    """Read the real function: running it needs a process group, a model and Bridge's whole configuration."""
    if not hasattr(module, "train"):
        return Verdict(ABSENT, "this module has no train()")
    missing = [
        *missing_parameters(TRAIN, "model", "optimizer", "global_state"),
        *missing_names(TRAIN, "get_model_config", "get_rerun_state_machine", "timers", INTERVAL_TIMER),
        *missing_attributes(f"{MODULE}:", "get_model_config", "get_rerun_state_machine"),
        *missing_names("megatron.core.timers:Timers.__init__", "_timers"),
        *missing_names("megatron.core.timers:Timer.__init__", "_started"),
        *missing_attributes("megatron.core.rerun_state_machine:RerunState", *BEFORE_STEP, *BEFORE_STEP.values()),
        *missing_names(f"{DDP}.__init__", "use_forward_hook", "remove_forward_pre_hook_handles"),
    ]
    if missing:
        return lacking(missing)
    return Verdict(NEEDED, f"train() never stops the {INTERVAL_TIMER} timer it starts")


def make_reentrant(train: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(train)
    module = sys.modules[train.__module__]
    warn = make_warn_once()
    trained: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(train)
    def patched_train(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs).arguments
        model, state = call["model"], call["global_state"]
        config, timers = module.get_model_config(model[0]), state.timers
        machine = module.get_rerun_state_machine()
        collecting = gc.isenabled()

        # An earlier call, patched or not, has started the timer; the global state may be new since.
        if INTERVAL_TIMER in timers._timers or any(chunk in trained for chunk in model):
            stop_interval_timer(timers)
            rewind_interrupted_step(machine)
            _refuse_shared_buffers(model)
            finish_earlier_call(model)
            _turn_forward_pre_hooks_on(model)
        trained.update(model)
        with (
            timers_stopped(timers),
            rerun_machine_restored(machine),
            config_hooks_restored(config, model),
            _optimizer_step_restored(call["optimizer"]),
        ):
            result = train(*args, **kwargs)
        if collecting and not gc.isenabled():
            warn("gc", "train() has left Python's garbage collector off (manual_gc); gc.enable() turns it on")
        return result

    return patched_train


def _turn_forward_pre_hooks_on(model: Sequence[Any]) -> None:
    """As before a first call. Parameters are gathered, so that a forward pass would find nothing to do."""
    for chunk in ddp_chunks(model):
        if chunk.use_forward_hook and not chunk.remove_forward_pre_hook_handles:
            chunk.enable_forward_pre_hook()


def _refuse_shared_buffers(model: Sequence[Any]) -> None:
    """Where parameters are gathered in the buffer of the gradients, each has to be put there at the right time."""
    if any(
        chunk.use_forward_hook and getattr(chunk.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False)
        for chunk in ddp_chunks(model)
    ):
        raise MegapatchError(
            "with reuse_grad_buf_for_mxfp8_param_ag and overlap_param_gather Megatron-Bridge's train() ends and "
            "begins in ways that only fit one call in a process: a further one would mix up parameters and "
            "gradients. Turn reuse_grad_buf_for_mxfp8_param_ag off"
        )


@contextlib.contextmanager
def _optimizer_step_restored(optimizer: Any) -> Iterator[None]:
    """Around the call: the optimizer's step() stays its own, or the one that a user gave it."""
    own = vars(optimizer).get("step")
    try:
        yield
    finally:
        if own is not None:
            optimizer.step = own
        else:
            vars(optimizer).pop("step", None)


SITE = Site(module=MODULE, diagnose=diagnose, replace={"train": make_reentrant})
