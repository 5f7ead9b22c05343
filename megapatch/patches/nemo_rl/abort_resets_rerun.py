"""After abort_train_step() the worker can train again, as if the step had never begun.

Symptom   a split step was interrupted and aborted; the next step dies with "UnboundLocalError: losses_reduced",
          because Megatron's rerun state machine takes its forward pass for the end of the interrupted one. With a
          mixture of experts, silently: the routers' counts of the aborted step go into the next one's expert bias
          and global auxiliary loss, and its auxiliary losses into the log.
Upstream  NVIDIA-NeMo/RL#2683 introduced it; no issue of its own is known. Main at 7ea279abf has it.
Seam      abort_train_step: the machine is rewound to its state before the step, and counts are zeroed. Expert
          bias, losses that wait to be logged, and the fp16 loss scale are as begin_train_step found them.
Limits    not covered: the state that train() leaves behind after an exception. It opens no step. Parameters
          that the optimizer has changed before an exception in finish_train_step stay changed.
Numbers   change after an abort with a mixture of experts, to those of a worker in which the step never began.
Cost      10 us a step, and with a mixture of experts copies of its biases and logged losses, about 0.1 ms on a
          CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._mcore.bucket_groups import chunks_of
from ..._mcore.rerun_machine import machine_of_this_process, rewind_interrupted_step
from ..._mcore.step_state import COUNTS, StepState
from ...patch import ABSENT, FIXED, NEEDED, Patch, Site, Verdict
from .._diagnosis import expect_none, unmet
from .._ray_actors import actors_of
from ._workers import MODULE, SPLIT_STEP, WORKER, has_own_split_step, is_open, names_in, no_worker

BEFORE = "_megapatch_state_before_step"
"""Attribute of a worker: what its open step changes outside of gradients, as it was.

That refers to the worker's model, which a table would keep; nobody pickles a worker."""


def diagnose(module: ModuleType) -> Verdict:
    """Look at the names that the real method mentions."""
    worker = getattr(module, WORKER, None)
    if worker is None:
        return no_worker(module)
    if not has_own_split_step(worker):
        return Verdict(ABSENT, "this version has no abort_train_step of its own")
    mentioned = names_in(worker, "abort_train_step")
    if any("rerun" in name.lower() for name in mentioned):
        if mentioned & {"reset_model_temporary_tensors", *COUNTS}:
            return Verdict(FIXED, "abort_train_step mentions the rerun state machine and the routers' counts")
        return Verdict(NEEDED, "abort_train_step does not reset the routers' counts")
    expect_none(*unmet.attributes(f"{module.__name__}:{WORKER}", *SPLIT_STEP))
    return Verdict(NEEDED, "abort_train_step does not reset the rerun state machine")


def remembering(begin_train_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin_train_step)
    def patched_begin_train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_open(self):  # else it raises, and the open step goes on
            setattr(self, BEFORE, StepState(chunks_of(self.model) or [], self.optimizer))
        return begin_train_step(self, *args, **kwargs)

    return patched_begin_train_step


def with_machine_at_rest(abort_train_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(abort_train_step)
    def patched_abort_train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        was_open = is_open(self)
        result = abort_train_step(self, *args, **kwargs)
        machine = machine_of_this_process()
        if was_open and machine is not None:
            rewind_interrupted_step(machine)
        if was_open and (state := getattr(self, BEFORE, None)) is not None:
            state.put_back()
        return result

    return patched_abort_train_step


PATCH = Patch(
    name="nemo_rl.abort-resets-rerun",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/RL/pull/2683",
    sites=(
        Site(
            MODULE,
            diagnose,
            replace={
                f"{WORKER}.begin_train_step": remembering,
                f"{WORKER}.abort_train_step": with_machine_at_rest,
            },
            rebuild=actors_of(WORKER),
        ),
    ),
    changes_numbers=True,
)
