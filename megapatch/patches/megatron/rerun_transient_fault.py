"""A fault that its rerun does not repeat ends the job without saving a checkpoint that cannot be resumed.

Symptom   a NaN (or another rejected result) appears in a step but not in its rerun in place. Megatron saves
          a checkpoint and exits; the resumed job dies on "TypeError: 'NoneType' object is not subscriptable": the
          checkpoint puts it in the middle of a rerun, which needs state that only the old process had.
Upstream  NVIDIA/Megatron-LM#3981 (issue #3884); in 0.12.0-0.17.1, fixed in 0.18.0.
Seam      the class attribute. Asked whether to save and exit right after a rerun in place, the machine gives
          the same answer except for the checkpoint: exit with the same code, save nothing, as with 0.18.
Limits    the job continues from its last checkpoint and repeats the steps since. Checkpoints already saved this
          way stay as they are: resume from an older one. Megatron's own log line still announces a checkpoint.
Cost      a comparison once a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._python.dotted import temporarily_set
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict, unpatched
from .._diagnosis import answering_none, expect_none, running, unmet

MODULE = "megatron.core.rerun_state_machine"
MACHINE = f"{MODULE}:RerunStateMachine"
IN_PLACE = "RERUNNING_IN_PLACE"


def diagnose(module: ModuleType) -> Verdict:
    """Ask a bare machine that has just rerun a step in place."""
    expect_none(
        *unmet.attributes(MACHINE, "should_checkpoint_and_exit"),
        *unmet.attributes(f"{MODULE}:RerunState", IN_PLACE),
        *unmet.attributes(f"{MODULE}:RerunMode", "VALIDATE_RESULTS"),
        *unmet.attributes(f"{MODULE}:logger", "disabled"),
    )
    machine = object.__new__(answering_none(module.RerunStateMachine))
    machine.mode, machine.state = module.RerunMode.VALIDATE_RESULTS, module.RerunState[IN_PLACE]
    # It announces an exit that does not happen.
    with running("should_checkpoint_and_exit()"), temporarily_set(module.logger, disabled=True):
        checkpoint, leave, _ = unpatched(module.RerunStateMachine.should_checkpoint_and_exit)(machine)
    if not leave:
        return Verdict(UNKNOWN, "expected a fault that its rerun does not repeat to end the job, and it does not")
    if checkpoint:
        return Verdict(
            NEEDED,
            "after a fault that its rerun does not repeat, a checkpoint is saved in the middle of the rerun",
        )
    return Verdict(FIXED, "after a fault that its rerun does not repeat, no checkpoint is saved")


def exit_without_checkpoint(should_checkpoint_and_exit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(should_checkpoint_and_exit)
    def patched_should_checkpoint_and_exit(self: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoint, leave, code = should_checkpoint_and_exit(self, *args, **kwargs)
        if checkpoint and self.state.name == IN_PLACE:
            return False, leave, code
        return checkpoint, leave, code

    return patched_should_checkpoint_and_exit


PATCH = Patch(
    name="megatron.rerun-transient-fault",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/3981",
    sites=(
        Site(MODULE, diagnose, replace={"RerunStateMachine.should_checkpoint_and_exit": exit_without_checkpoint}),
    ),
)
