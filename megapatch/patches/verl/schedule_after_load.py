"""A verl job that resumes is at the checkpoint's step of the learning rate schedule.

Symptom   a resumed run begins its schedule again, silently: saved at step 5, loaded, the schedule is at 0, and the
          learning rate is that of a new run, warmup included. verl saves the schedule with the optimizer, and
          loads it only with actor.optim.use_checkpoint_opt_param_scheduler, which is False by default.
Upstream  verl-project/verl#7953, repaired by #7954 (open); in 0.6.1 to 0.9.1.
Seam      the class attribute MegatronCheckpointManager.load_checkpoint(): where the optimizer is loaded, the
          original loads its schedule, too. verl gives the schedule the opposite of the option as
          override_opt_param_scheduler, so that it takes the number of steps from the checkpoint and keeps its own
          rates, as with Megatron's --override-opt_param-scheduler.
Limits    a schedule that does not override is left to the option. A load without the optimizer leaves the schedule
          alone. A checkpoint of the optimizer without a schedule, which no release writes, ends with verl's own
          "LR scheduler state dict not found".
Numbers   change in resumed runs whose learning rate is not constant, to those of a run that continued.
Cost      nothing in a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._python.dotted import temporarily_set
from ...patch import NEEDED, Patch, Site, Verdict
from .._diagnosis import expect_none, unmet

MODULE = "verl.utils.checkpoint.megatron_checkpoint_manager"
LOAD = "MegatronCheckpointManager.load_checkpoint"
OPTION = "use_checkpoint_opt_param_scheduler"
OVERRIDES = "override_opt_param_scheduler"


def diagnose(module: ModuleType) -> Verdict:
    """Read the real method: it asks for the option. A release that does not is one that nobody has looked at."""
    manager = f"{module.__name__}:MegatronCheckpointManager"
    expect_none(
        *unmet.names(f"{manager}.load_checkpoint", OPTION, "lr_scheduler", "load_state_dict"),
        *unmet.names(f"{manager}.__init__", OPTION),
    )
    return Verdict(NEEDED, f"without {OPTION} a resumed run begins its schedule again")


def load_with_schedule(load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_checkpoint)
    def patched_load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self.lr_scheduler, OVERRIDES, False) is not True:  # a mock of verl's own tests says yes to all
            return load_checkpoint(self, *args, **kwargs)
        with temporarily_set(self, **{OPTION: True}):
            return load_checkpoint(self, *args, **kwargs)

    return patched_load_checkpoint


PATCH = Patch(
    name="verl.schedule-after-load",
    doc=__doc__,
    upstream="https://github.com/verl-project/verl/pull/7954",
    changes_numbers=True,
    sites=(Site(MODULE, diagnose, replace={LOAD: load_with_schedule}),),
)
