"""A scheduler that loads a checkpoint is at the checkpoint's step, whatever step it was at, and so are its rates.

Symptom   a checkpoint that is loaded into a scheduler which has stepped puts it at the sum of its own steps and
          the checkpoint's, silently: saved at 5, trained to 8, and loaded, it is at 13. Each load adds again, and
          the learning rate is that of a later step. The first step after any load has a weight decay computed from
          the scheduler's settings before the load, not from the checkpoint's. A state without one of its keys ends
          with "KeyError: 'end_wd'", half loaded.
Upstream  NovaSky-AI/SkyRL#2214 (open), radixark/miles#2974 (open); in 0.12 to 0.19.
          OptimizerParamScheduler.load_state_dict() calls step(increment=...), and nothing resets num_steps before.
          It reads the settings of weight decay after that call. In Megatron-Bridge, verl, SkyRL and AReaL it is
          the same class.
Seam      the class attribute load_state_dict(): num_steps is 0 before the original runs, as in a new scheduler.
          The scheduler's own step(0) after it writes the rates of its optimizer. If either raises, the scheduler
          and the rates are put back as they were before the load.
Limits    a load that fails here leaves weights and optimizer state that were loaded before it.
          A scheduler with a step() of its own is not stepped a second time: its first step after a load has the
          weight decay that Megatron computes. A wrapper on the class's step() sees one more call, of no steps.
Numbers   change where the scheduler has stepped before the load, to those of a new scheduler that loads the same.
          If the scheduler had another weight decay than the checkpoint's, that of the first step after a load
          changes, too, to that of an uninterrupted run.
Cost      nothing in a step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict, unpatched
from .._diagnosis import StandIn, answering_none, expect_none, running, unmet

MODULE = "megatron.core.optimizer_param_scheduler"
SCHEDULER = "OptimizerParamScheduler"
STEPS = "num_steps"
RATES = ("lr", "weight_decay")
"""The settings of the optimizer's groups that step() writes."""


def diagnose(module: ModuleType) -> Verdict:
    """Load a state of 5 steps into the real scheduler, which is at 3."""
    expect_none(*unmet.attributes(f"{MODULE}:{SCHEDULER}", "load_state_dict", "state_dict", "step"))
    with running(f"{SCHEDULER}.load_state_dict()"):
        (new, at_once), (used, _) = (_after_a_load(getattr(module, SCHEDULER), steps) for steps in (0, 3))
    if (new, used) not in ((5, 5), (5, 8)):
        return Verdict(UNKNOWN, f"expected to load 5 steps as 5 or, after 3 steps, as 8; found {new} and {used}")
    if used == 8:
        return Verdict(NEEDED, "a scheduler adds the steps that it loads to its own")
    if not at_once:
        return Verdict(NEEDED, "the first step after a load has the weight decay of the schedule before it")
    return Verdict(FIXED, "a scheduler that loads a checkpoint is at the checkpoint's step, and so are its rates")


def load_from_the_start(load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_state_dict)
    def patched_load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = dict(vars(self))
        rates = [(group, name, group[name]) for group in _groups(self) for name in RATES if name in group]
        values = [value.clone() if hasattr(value, "clone") else None for _, _, value in rates]
        setattr(self, STEPS, 0)
        try:
            result = load_state_dict(self, *args, **kwargs)
            if getattr(self.step, "__func__", None) is getattr(sys.modules[MODULE], SCHEDULER).step:
                self.step(0)  # the original has computed weight decay before it read the settings
            return result
        except BaseException:
            vars(self).update(before)
            for (group, name, rate), value in zip(rates, values, strict=True):
                group[name] = rate
                if value is not None:  # from 0.17 on, step() writes into a tensor
                    rate.copy_(value)
            raise

    return patched_load_state_dict


def _groups(scheduler: Any) -> Any:
    groups = getattr(scheduler.optimizer, "param_groups", ())
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def _after_a_load(kind: Any, steps: int) -> tuple[int, bool]:
    """Load 5 steps, and another weight decay, into a scheduler at `steps`.

    Return its steps, and whether the rates of its optimizer are its own for them.
    """
    group: dict[str, Any] = {}
    settings = dict(start_wd=0.0, end_wd=0.0, wd_incr_steps=20, wd_incr_style="linear")
    scheduler = object.__new__(answering_none(kind))
    vars(scheduler).update(
        settings,
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=20,
        lr_decay_style="linear",
        optimizer=StandIn(param_groups=[group]),
        num_steps=steps,
        _check_and_set=lambda value, loaded, name: loaded,  # the real one logs
    )
    state = {**unpatched(kind.state_dict)(scheduler), STEPS: 5, "end_wd": 1.0}
    unpatched(kind.load_state_dict)(scheduler, state)
    loaded, at = dict(group), getattr(scheduler, STEPS)
    unpatched(kind.step)(scheduler, 0)
    return at, loaded == group


PATCH = Patch(
    name="megatron.scheduler-after-load",
    doc=__doc__,
    upstream="https://github.com/NovaSky-AI/SkyRL/issues/2214",
    changes_numbers=True,
    sites=(Site(MODULE, diagnose, replace={f"{SCHEDULER}.load_state_dict": load_from_the_start}),),
)
