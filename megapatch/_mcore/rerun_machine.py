"""Megatron's rerun state machine, which an interrupted step leaves stuck inside that step."""

from __future__ import annotations

import sys
from typing import Any

MODULE = "megatron.core.rerun_state_machine"
BEFORE_STEP = {
    "INITIAL_RUN": "NOT_RUNNING_YET",
    "RERUNNING_IN_PLACE": "NOT_RUNNING_YET",
    "RERUNNING_FROM_CHECKPOINT": "WILL_RERUN_FROM_CHECKPOINT",
}
"""States of the machine inside a step, each with the state before that step."""


def rewind_interrupted_step(machine: Any) -> None:
    """Rewind a machine that is stuck inside a step to its state before that step."""
    before = BEFORE_STEP.get(machine.state.name)
    if before is not None:
        machine.state = type(machine.state)[before]


def is_rerunning() -> bool:
    """Return whether the machine of this process has a step run again."""
    machine = machine_of_this_process()
    return machine is not None and machine.state.name.startswith("RERUNNING")


def machine_of_this_process() -> Any:
    """Return the machine, or None if there is none: asking Megatron for it would make one."""
    return getattr(sys.modules.get(MODULE), "_GLOBAL_RERUN_STATE_MACHINE", None)
