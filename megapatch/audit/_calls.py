"""hooks-balanced: a forward-backward call leaves what it found.

Symptom   a call that was interrupted, or a no_sync() that was entered twice, leaves hooks or flags behind; the
          next call reduces gradients in every microbatch, or in none. Or the rerun machine still believes itself
          inside the step that an exception ended, and takes the next step for the end of that one.
Upstream  NVIDIA-NeMo/RL#3660, THUDM/slime#1779.
Seam      the three functions that get_forward_backward_func() returns, and should_run_forward_backward() of the
          rerun machine. What an exception leaves behind is judged as the next call begins: until then, whoever
          caught it may have put it right.
Limits    the model config's hooks and timers, no_sync() and forward pre-hooks of the chunks, and the state of the
          rerun machine; not what a trainer keeps itself.
Cost      some microseconds a call.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from .._mcore.bucket_groups import bucket_groups, chunks_of
from .._mcore.rerun_machine import BEFORE_STEP, MODULE, machine_of_this_process
from ..patch import Patch
from . import _gradients, _scales, _tokens
from ._findings import LEDGER, observes
from ._sites import site

SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)

_LEFT = "_megapatch_left"
"""Attribute of a model's first chunk: by name, what a call that raised has left behind."""
_interrupted: weakref.WeakSet[Any] = weakref.WeakSet()
"""Rerun machines that were inside a step when a call raised."""
_NOTHING = object()


def watch_call(schedule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(schedule)
    def patched_forward_backward(*args: Any, **kwargs: Any) -> Any:
        chunks = chunks_of(kwargs.get("model")) or []
        if not chunks:
            return schedule(*args, **kwargs)
        before = _begin(chunks)
        trains = not kwargs.get("forward_only")
        if trains:
            _scales.note_call(chunks)
        _tokens.begin_call(trains)
        has_returned = False
        try:
            result = schedule(*args, **kwargs)
            has_returned = True
        finally:
            _tokens.end_call()
            _end(chunks, before, has_returned)
        return result

    return patched_forward_backward


@observes
def _begin(chunks: list[Any]) -> dict[str, Any]:
    """Return what a call finds, and report what an earlier one that raised has left, and nobody has put right."""
    found = _snapshot(chunks)
    left = vars(chunks[0]).pop(_LEFT, {})
    _report([name for name, value in left.items() if found.get(name, _NOTHING) == value])
    return found


@observes
def _end(chunks: list[Any], before: dict[str, Any] | None, has_returned: bool) -> None:
    if before is None:
        return
    after = _snapshot(chunks)
    changed = {name: value for name, value in after.items() if before.get(name, _NOTHING) != value}
    if has_returned:
        _report(list(changed))
    else:
        vars(chunks[0])[_LEFT] = changed
        _gradients.excuse(chunks)
        machine = machine_of_this_process()
        if machine is not None and machine.state.name in BEFORE_STEP:
            _interrupted.add(machine)


def _report(changed: list[str]) -> None:
    if changed:
        LEDGER.report("hooks-balanced", "call", f"a forward-backward call did not put back {', '.join(changed)}")


def _snapshot(chunks: list[Any]) -> dict[str, Any]:
    config, found = chunks[0].config, {}
    for name, value in vars(config).items():
        if name.endswith("_func"):
            found[f"config.{name}"] = list(value) if isinstance(value, list) else value
    for name, timer in getattr(getattr(config, "timers", None), "_timers", {}).items():
        if getattr(timer, "_started", False):  # a call makes those that it needs
            found[f"the timer {name}"] = True
    for number, chunk in enumerate(chunks):
        found[f"the forward pre-hooks of chunk {number}"] = bool(
            getattr(chunk, "remove_forward_pre_hook_handles", None)
        )
        found[f"no_sync() of chunk {number}"] = [group.is_last_microbatch for group in bucket_groups(chunk)]
    return found


# ------------------------------------------------------------------------ the rerun machine
def watch_machine(should_run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(should_run)
    def patched_should_run_forward_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _interrupted:
            _judge_machine(self)
        return should_run(self, *args, **kwargs)

    return patched_should_run_forward_backward


@observes
def _judge_machine(machine: Any) -> None:
    if machine in _interrupted and machine.state.name in BEFORE_STEP:
        LEDGER.report(
            "hooks-balanced",
            "machine",
            f"the rerun machine is still {machine.state.name}, in a step that an exception has ended, and takes "
            "the step that begins for its end",
        )
    _interrupted.discard(machine)


PATCH = Patch(
    name="audit.calls",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/RL/pull/3660",
    sites=(
        site("megatron.core.pipeline_parallel.schedules", dict.fromkeys(SCHEDULES, watch_call)),
        site(MODULE, {"RerunStateMachine.should_run_forward_backward": watch_machine}),
    ),
)
