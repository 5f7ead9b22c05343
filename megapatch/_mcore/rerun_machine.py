"""Megatron's rerun state machine after an interrupted step: it believes that the step is still going on."""

from __future__ import annotations

import sys
from typing import Any

MODULE = "megatron.core.rerun_state_machine"
BEFORE_STEP = {
    "INITIAL_RUN": "NOT_RUNNING_YET",
    "RERUNNING_IN_PLACE": "NOT_RUNNING_YET",
    "RERUNNING_FROM_CHECKPOINT": "WILL_RERUN_FROM_CHECKPOINT",
}
"""States of the machine inside a step, and the one it had before that step."""


def rewind_interrupted_step(machine: Any) -> None:
    """Put a machine that believes to be inside a step back before that step."""
    before = BEFORE_STEP.get(machine.state.name)
    if before is not None:
        machine.state = type(machine.state)[before]


def machine_of_this_process() -> Any:
    """None where there is none: asking Megatron for it would make one."""
    return getattr(sys.modules.get(MODULE), "_GLOBAL_RERUN_STATE_MACHINE", None)
