"""After abort_train_step() the worker can train again.

Symptom   a split step was interrupted and aborted; the next step dies with "UnboundLocalError: losses_reduced",
          because Megatron's rerun state machine takes its forward pass for the end of the interrupted one.
Upstream  NVIDIA-NeMo/RL#2683 introduced it; no issue of its own is known. Main at 7ea279abf has it.
Seam      abort_train_step: the machine is rewound to its state before the step.
Limits    not covered: what train() leaves behind after an exception. It opens no step.
Cost      none: nothing calls abort_train_step in a run that goes well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._mcore.rerun_machine import machine_of_this_process, rewind_interrupted_step
from ...patch import ABSENT, FIXED, NEEDED, Patch, Site, Verdict
from .._diagnosis import lacking, missing_attributes
from .._ray_actors import actors_of
from ._workers import MODULE, WORKER, has_own_split_step, is_open, names_in, no_worker


def diagnose(module: ModuleType) -> Verdict:
    """Look at what the real method mentions."""
    worker = getattr(module, WORKER, None)
    if worker is None:
        return no_worker(module)
    if not has_own_split_step(worker):
        return Verdict(ABSENT, "this version has no abort_train_step of its own")
    if any("rerun" in name.lower() for name in names_in(worker, "abort_train_step")):
        return Verdict(FIXED, "abort_train_step mentions the rerun state machine")
    missing = missing_attributes(f"{module.__name__}:{WORKER}", "abort_train_step")
    if missing:
        return lacking(missing)
    return Verdict(NEEDED, "abort_train_step does not reset the rerun state machine")


def with_machine_at_rest(abort_train_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(abort_train_step)
    def patched_abort_train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        was_open = is_open(self)
        result = abort_train_step(self, *args, **kwargs)
        machine = machine_of_this_process()
        if was_open and machine is not None:
            rewind_interrupted_step(machine)
        return result

    return patched_abort_train_step


PATCH = Patch(
    name="nemo_rl.abort-resets-rerun",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/RL/pull/2683",
    sites=(
        Site(
            module=MODULE,
            diagnose=diagnose,
            replace={f"{WORKER}.abort_train_step": with_machine_at_rest},
            rebuild=actors_of(WORKER),
        ),
    ),
)
