"""The functions of megatron.train-reentry for Megatron-Bridge's own train(), loaded with it."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from ..._mcore.bucket_groups import DDP
from ..._mcore.known import OPTIMIZER, TIMERS, arguments_of, is_a, is_model
from ..._mcore.rerun_machine import rewind_interrupted_step
from ..._python.dotted import find
from ...errors import MegapatchError
from ...patch import NEEDED, Verdict
from .._diagnosis import expect_none, unmet
from ._around_train import (
    INTERVAL_TIMER,
    config_hooks_restored,
    ddp_chunks,
    finish_earlier_call,
    gather_other_steps,
    missing_of_timers_and_machine,
    rerun_machine_restored,
    stop_interval_timer,
    timed_call,
)

MODULE = "megatron.bridge.training.train"
TRAIN = f"{MODULE}:train"


def diagnose(module: ModuleType) -> Verdict:
    """Read the real function: running it needs a process group, a model and Bridge's whole configuration."""
    expect_none(
        *unmet.parameters(TRAIN, "model", "optimizer", "global_state"),
        *unmet.parameters(f"{MODULE}:train_step", "model", "optimizer"),
        *unmet.names(TRAIN, "get_model_config", "get_rerun_state_machine", "timers", INTERVAL_TIMER),
        *unmet.attributes(f"{MODULE}:", "get_model_config", "get_rerun_state_machine"),
        *missing_of_timers_and_machine(),
        *unmet.names(f"{DDP}.__init__", "use_forward_hook", "remove_forward_pre_hook_handles"),
    )
    return Verdict(NEEDED, f"train() never stops the {INTERVAL_TIMER} timer it starts")


def make_reentrant(train: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(train)
    module = sys.modules[train.__module__]
    trained: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(train)
    def patched_train(*args: Any, **kwargs: Any) -> Any:
        call = arguments_of(signature, args, kwargs)
        model, timers = call.get("model"), find(call.get("global_state"), "timers")
        if not is_model(model) or not is_a(call["optimizer"], OPTIMIZER) or not is_a(timers, TIMERS):
            return train(*args, **kwargs)
        config = module.get_model_config(model[0])
        machine = module.get_rerun_state_machine()

        # An earlier call, patched or not, has started the timer, unless the global state is new since then.
        if INTERVAL_TIMER in timers._timers or any(chunk in trained for chunk in model):
            stop_interval_timer(timers)
            rewind_interrupted_step(machine)
            _refuse_shared_buffers(model)
            finish_earlier_call(model)
            _turn_forward_pre_hooks_on(model)
        gather_other_steps(model)
        trained.update(model)
        with timed_call(timers), rerun_machine_restored(machine), config_hooks_restored(config, model):
            return train(*args, **kwargs)

    return patched_train


def _turn_forward_pre_hooks_on(model: Sequence[Any]) -> None:
    """Turn them on, as before a first call. Parameters are gathered, so a forward pass finds nothing to do."""
    for chunk in ddp_chunks(model):
        if chunk.use_forward_hook and not chunk.remove_forward_pre_hook_handles:
            chunk.enable_forward_pre_hook()


def _refuse_shared_buffers(model: Sequence[Any]) -> None:
    """Raise MegapatchError where parameters and gradients share a buffer, which needs each at the right time."""
    if any(
        chunk.use_forward_hook and getattr(chunk.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False)
        for chunk in ddp_chunks(model)
    ):
        raise MegapatchError(
            "with reuse_grad_buf_for_mxfp8_param_ag and overlap_param_gather Megatron-Bridge's train() ends and "
            "begins in ways that only fit one call in a process: another call would mix up parameters and "
            "gradients. Turn reuse_grad_buf_for_mxfp8_param_ag off"
        )
