"""A slime job that resumes is at the checkpoint's step of the learning rate schedule.

Symptom   a resumed run is at twice the step of its checkpoint, silently: saved at sample 24, resumed at 48.
Upstream  THUDM/slime#1775; in v0.2.2 and v0.2.3, from #1152 on, and in miles, where main leaves it out only with
          --use-checkpoint-opt_param-scheduler. load_checkpoint() has loaded the schedule, and
          initialize_model_and_optimizer() advances it by iterations times the global batch size all the same.
Seam      initialize_model_and_optimizer() of megatron_utils.model: a schedule that load_checkpoint() has set is
          where that has set it.
Limits    a schedule that was not loaded, as with --no-load-optim, stays where slime has put it.
Numbers   change in resumed runs whose learning rate is not constant, to those of a run that continued.
Cost      nothing in a step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._python.dotted import temporarily_set
from ...patch import FIXED, NEEDED, NotAsExpected, Patch, Site, Verdict
from .._diagnosis import expect_none, reads_in_order, unmet

BEGIN = "initialize_model_and_optimizer"
LOAD, STEP, BATCH = "load_checkpoint", "step", "global_batch_size"


def diagnose(module: ModuleType) -> Verdict:
    """Read the real function: running it needs a model, and a checkpoint of it."""
    expect_none(*unmet.parameters(f"{module.__name__}:{BEGIN}", "args"))
    found = reads_in_order(getattr(module, BEGIN), LOAD, STEP, BATCH)
    if found == [LOAD]:
        return Verdict(FIXED, f"{BEGIN}() leaves the schedule where {LOAD}() has put it")
    if found == [LOAD, STEP, BATCH]:
        return Verdict(NEEDED, f"{BEGIN}() advances a schedule that {LOAD}() has loaded")
    raise NotAsExpected(f"expected but not found: {LOAD}, {STEP} and {BATCH} in {module.__name__}:{BEGIN}")


def advance_once(initialize: Callable[..., Any]) -> Callable[..., Any]:
    module = sys.modules[initialize.__module__]

    @functools.wraps(initialize)
    def patched_initialize_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        load = getattr(module, LOAD)
        loaded: list[tuple[Any, int]] = []

        @functools.wraps(load)
        def noting_load(*args: Any, **kwargs: Any) -> Any:
            result = load(*args, **kwargs)
            loaded.extend(
                (each, each.num_steps) for each in (*args, *kwargs.values()) if hasattr(each, "num_steps")
            )
            return result

        with temporarily_set(module, **{LOAD: noting_load}):
            result = initialize(*args, **kwargs)
        for schedule, steps in loaded:
            if steps and schedule.num_steps != steps:
                schedule.num_steps = steps
                schedule.step(increment=0)  # sets the rates
        return result

    return patched_initialize_model_and_optimizer


PATCH = Patch(
    name="slime.schedule-after-load",
    doc=__doc__,
    upstream="https://github.com/THUDM/slime/pull/1775",
    changes_numbers=True,
    sites=tuple(
        Site(f"{framework}.backends.megatron_utils.model", diagnose, replace={BEGIN: advance_once})
        for framework in ("slime", "miles")
    ),
)
