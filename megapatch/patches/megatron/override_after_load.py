"""With --override-opt_param-scheduler a resumed run has its own learning rate, not the checkpoint's.

Symptom   resumed with another learning rate and --override-opt_param-scheduler, a run trains with the checkpoint's
          rate, silently, up to 0.18. From 0.19 on the load ends with "ValueError: Could not find parameter group
          with key", with the distributed optimizer with a KeyError.
Upstream  NVIDIA/Megatron-LM#1138, #1284 (open); in 0.12 to 0.19. #5213 repairs Megatron's own load_checkpoint() on
          main. The optimizer's groups have a max_lr and min_lr of their own, which get_lr() prefers to the
          scheduler's, and which are loaded with the optimizer; 0.19 also finds groups by them.
Seam      OptimizerParamScheduler.__init__() notes in its optimizer that it overrides. A chain's load_state_dict()
          gives each optimizer that does groups with its own rates in place of the checkpoint's. A group of the
          checkpoint is the one that agrees in all else by which Megatron tells groups apart.
Limits    groups that differ in nothing but their rates are loaded as before. The scheduler has to be made before
          the optimizer loads, as by all known trainers.
Numbers   change where the flag had no effect, to those of the rate that was asked for.
Cost      nothing in a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._mcore.known import OPTIMIZER, is_a
from ..._mcore.main_params import children_of
from ..._mcore.side_table import SideTable
from ..._python.dotted import find, temporarily_set
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict, unpatched
from .._diagnosis import StandIn, answering_none, expect_none, running, unmet
from ._param_groups import GROUPS, TOLD_APART_BY

SCHEDULERS = "megatron.core.optimizer_param_scheduler"
OPTIMIZERS = "megatron.core.optimizer"
SCHEDULER = "OptimizerParamScheduler"
FLAG = "override_opt_param_scheduler"
FP32 = "optimizer.FP32Optimizer"
CHAINED = "optimizer.ChainedOptimizer"
OVERRIDES = SideTable()
"""Whether the scheduler of an optimizer overrides what a checkpoint says."""


def diagnose_scheduler(module: ModuleType) -> Verdict:
    """Read the real scheduler: it prefers a group's own rate, and knows the flag."""
    expect_none(
        *unmet.reads(f"{SCHEDULERS}:{SCHEDULER}.get_lr", "max_lr", "min_lr"),
        *unmet.reads(f"{SCHEDULERS}:{SCHEDULER}._check_and_set", FLAG),
    )
    return Verdict(NEEDED, "an optimizer does not learn that its scheduler overrides")


def diagnose_optimizers(module: ModuleType) -> Verdict:
    """Load a group of another rate with the real optimizer."""
    for owner in (OPTIMIZER, f"{OPTIMIZERS}:{FP32}", f"{OPTIMIZERS}:{CHAINED}"):
        expect_none(*unmet.attributes(owner, "load_state_dict"))
    loaded: list[Any] = []
    optimizers = find(module, "optimizer")
    optimizer = object.__new__(answering_none(optimizers.FP32Optimizer))
    inner = StandIn(param_groups=[_group(max_lr=1.0)], load_state_dict=loaded.append)
    OVERRIDES.set(optimizer, True)
    vars(optimizer).update({"optimizer": inner})
    state = {"state": {}, GROUPS: [_group(max_lr=2.0)]}
    one_stage = StandIn(get_pipeline_model_parallel_world_size=lambda: 1)  # 0.12 asks, for nothing
    with running("FP32Optimizer.load_state_dict()"):
        try:
            with temporarily_set(optimizers, parallel_state=one_stage):
                unpatched(optimizers.FP32Optimizer.load_state_dict)(optimizer, state)
        except ValueError as error:
            if "max_lr" in str(error):
                return Verdict(NEEDED, "groups of another learning rate than the checkpoint's are not found")
            raise
        rate = loaded[0][GROUPS][0]["max_lr"]
    if rate == 2:
        return Verdict(NEEDED, "an optimizer loads the learning rates that its scheduler is to override")
    if rate == 1:
        return Verdict(FIXED, "an optimizer loads no learning rates that its scheduler overrides")
    return Verdict(UNKNOWN, f"expected a group's own or the loaded learning rate; found {rate}")


def note_override(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def patched_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for optimizer in children_of(self.optimizer):
            if is_a(optimizer, OPTIMIZER):
                OVERRIDES.set(optimizer, bool(getattr(self, FLAG)))

    return patched_init


def keep_rates(load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_state_dict)
    def patched_load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        children = list(children_of(self))
        if any(map(OVERRIDES.get, children)):
            from ._rates_of_groups import with_rates_of_each  # few schedulers override

            state_dict = with_rates_of_each(children, state_dict)
        return load_state_dict(self, state_dict, *args, **kwargs)

    return patched_load_state_dict


def _group(**rates: float) -> dict[str, Any]:
    """Return a group of the kind that a diagnosis loads."""
    names = {name: 1.0 for name in TOLD_APART_BY[:2]}
    return {**names, **dict.fromkeys(TOLD_APART_BY[2:], False), "min_lr": 0.0, **rates, "params": []}


PATCH = Patch(
    name="megatron.override-after-load",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/issues/1138",
    changes_numbers=True,
    sites=(
        Site(OPTIMIZERS, diagnose_optimizers, replace={f"{CHAINED}.load_state_dict": keep_rates}),
        Site(SCHEDULERS, diagnose_scheduler, replace={f"{SCHEDULER}.__init__": note_override}),
    ),
)
