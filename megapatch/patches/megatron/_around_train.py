"""Context managers and checks that make a repeatable call out of train(), Megatron's or a framework's copy.

Such a function sets hooks on the model config and leaves them there, and disables and enables the forward
pre-hooks of DistributedDataParallel. It starts timers and drives the rerun state machine. An exception leaves all
of that half done.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..._mcore import bucket_groups
from ..._mcore.known import OPTIMIZER, arguments_of, is_a, is_model
from ..._mcore.param_gathers import has_stepped
from ..._mcore.rerun_machine import BEFORE_STEP, rewind_interrupted_step
from ..._mcore.rerun_machine import MODULE as RERUN
from ..._mcore.side_table import SideTable
from ..._mcore.step_state import StepState, running_timers
from ..._python.dotted import temporarily_set
from ...errors import MegapatchError
from ...patch import unpatched
from .._diagnosis import unmet

NO_SYNC_ASSERTION = "config.no_sync_func must be None"
"""Part of the text of the assertion that a second call meets where overlap_grad_reduce is on."""
INTERVAL_TIMER = "interval-time"
"""Megatron's timer around the training loop, started at entry and running at the end."""


def missing_of_timers_and_machine() -> list[str]:
    """Return what the functions below rely on, and this Megatron's timers and rerun state machine lack."""
    return [
        *unmet.names("megatron.core.timers:Timers.__init__", "_timers"),
        *unmet.names("megatron.core.timers:Timer.__init__", "_started", "_start_time", "_active_time"),
        *unmet.attributes(f"{RERUN}:RerunState", *BEFORE_STEP, *BEFORE_STEP.values()),
    ]


def finish_earlier_call(model: Sequence[Any]) -> None:
    """Finish the work that an earlier call left open, so that this one begins from gathered parameters.

    Runs a collective where something is open: an exception on all ranks leaves it open on all of them.
    Raises MegapatchError where gathering is no longer possible (reuse_grad_buf_for_mxfp8_param_ag).
    """
    for chunk in ddp_chunks(model):
        bucket_groups.settle_grad_reduces(chunk)
        bucket_groups.finish_param_gathers(chunk)
        if chunk.ddp_config.overlap_param_gather and bucket_groups.has_ungathered_params(chunk):
            raise MegapatchError(
                "train() was interrupted after an optimizer step and before the parameters were gathered. With "
                "reuse_grad_buf_for_mxfp8_param_ag they can no longer be gathered, and this call would train from "
                "old parameters: load a checkpoint in a new process"
            )


def gather_other_steps(model: Sequence[Any]) -> None:
    """Gather parameters that a step without train() has left: its first forward pass runs without pre-hooks.

    Runs a collective where there are some, which all ranks find alike.
    """
    for chunk in ddp_chunks(model):
        if has_stepped(chunk):
            bucket_groups.finish_param_gathers(chunk)


@contextlib.contextmanager
def without_own_no_sync(config: Any, model: Sequence[Any]) -> Iterator[None]:
    """Remove a no_sync_func that an earlier call set, for a train() that asserts there is none; keep a user's.

    Restores the config's hooks as well, as `config_hooks_restored` does.
    """
    found = config.no_sync_func
    with config_hooks_restored(config, model):
        if is_own_no_sync(found, model):
            config.no_sync_func = None
        yield


@contextlib.contextmanager
def config_hooks_restored(config: Any, model: Sequence[Any]) -> Iterator[None]:
    """Restore all hooks of the config after an exception.

    The next forward pass or `finish_earlier_call` gathers parameters that are not gathered yet. There is no
    collective in here, as the exception may be on one rank only.
    """
    hooks = {name: value for name, value in vars(config).items() if name.endswith("_func")}
    try:
        yield
    except BaseException:
        for name, value in hooks.items():
            setattr(config, name, value)
        for chunk in ddp_chunks(model):
            bucket_groups.forget_first_step(chunk)
            bucket_groups.gather_in_next_forward(chunk)
        raise


_ended = SideTable()
"""By Megatron's timers: when the latest call that they timed ended, by the clock that they use."""


@contextlib.contextmanager
def timed_call(timers: Any) -> Iterator[None]:
    """Stop the timers that the call has started and an exception has left running, but for the interval timer.

    That one runs when train() returns, and pretrain() stops it before it saves the last checkpoint: it stays as
    the call leaves it, until `stop_interval_timer`.
    """
    try:
        with timers_stopped(timers):
            yield
    finally:
        _ended.set(timers, time.time())


@contextlib.contextmanager
def timers_stopped(timers: Any) -> Iterator[None]:
    """Stop, after an exception, the timers that were started here, but for the interval timer."""
    before = running_timers(timers)
    try:
        yield
    except BaseException:
        for name in running_timers(timers) - before - {INTERVAL_TIMER}:
            timers._timers[name].stop()
        raise


def stop_interval_timer(timers: Any) -> None:
    """Stop it as another call begins, if the one before has left it running.

    Its active time gets the rest of that call, but nothing of the time since. The elapsed time begins at zero: the
    steps of that call that no log has counted are not in the next log either.
    """
    if INTERVAL_TIMER in running_timers(timers):
        timer = timers._timers[INTERVAL_TIMER]
        timer._active_time += max(0.0, _ended.get(timers, 0.0) - timer._start_time)
        timer.reset()


@contextlib.contextmanager
def rerun_machine_restored(machine: Any) -> Iterator[None]:
    """Put the machine back before the interrupted step, in its old mode, after an exception."""
    mode = machine.get_mode()
    try:
        yield
    except BaseException:
        if machine.get_mode() is not mode:  # evaluation switches it off, and may have raised the exception
            machine.set_mode(mode)
        rewind_interrupted_step(machine)
        raise


def leaving_nothing_if_dropped(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes one step, for an exception that comes before its optimizer has stepped.

    Router counts, expert bias, losses that wait to be logged and the fp16 loss scale are then as before the step.
    """
    signature = inspect.signature(train_step)

    @functools.wraps(train_step)
    def patched_train_step(*args: Any, **kwargs: Any) -> Any:
        call = arguments_of(signature, args, kwargs)
        model, optimizer = call.get("model"), call.get("optimizer")
        # miles has models that it only runs forward, without an optimizer
        if not is_model(model) or not is_a(optimizer, OPTIMIZER):
            return train_step(*args, **kwargs)
        before = [StepState(ddp_chunks(model), optimizer)]
        step = optimizer.step

        @functools.wraps(step)
        def patched_step(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            before.clear()
            return result

        try:
            with temporarily_set(optimizer, step=patched_step):
                return train_step(*args, **kwargs)
        except BaseException:
            for state in before:
                state.put_back()
            raise

    return patched_train_step


def is_own_no_sync(hook: Any, model: Sequence[Any]) -> bool:
    """Return whether train() itself set the hook: the no_sync of a model chunk, or a list of them.

    A bound method taken before a late activation does not equal one taken after it, so their parts are compared.
    """
    found = hook if isinstance(hook, list) else [hook]
    own = [chunk.no_sync for chunk in model if hasattr(chunk, "no_sync")]
    return bool(found) and all(any(_same_method(method, no_sync) for no_sync in own) for method in found)


def _same_method(first: Any, second: Any) -> bool:
    return (
        inspect.ismethod(first)
        and inspect.ismethod(second)
        and first.__self__ is second.__self__
        and unpatched(first.__func__) is unpatched(second.__func__)
    )


def ddp_chunks(model: Sequence[Any]) -> list[Any]:
    ddp = sys.modules[bucket_groups.MODULE].DistributedDataParallel
    return [chunk for chunk in model if isinstance(chunk, ddp)]
