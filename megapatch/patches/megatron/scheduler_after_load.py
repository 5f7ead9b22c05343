"""A scheduler that loads a checkpoint is at the checkpoint's step, whatever step it was at.

Symptom   a checkpoint that is loaded into a scheduler which has stepped puts it at the sum of its own steps and
          the checkpoint's, silently: saved at 5, trained to 8, and loaded, it is at 13. Each load adds again, and
          the learning rate is that of a later step. A state without one of its keys ends with "KeyError:
          'end_wd'", half loaded.
Upstream  NovaSky-AI/SkyRL#2214 (open), radixark/miles#2974 (open); in 0.12 to 0.19.
          OptimizerParamScheduler.load_state_dict() calls step(increment=...), and nothing resets num_steps before.
          In Megatron-Bridge, verl, SkyRL and AReaL it is the same class.
Seam      the class attribute load_state_dict(): num_steps is 0 before the original runs, as in a new scheduler. If
          that raises, the scheduler is put back as it was before the load, and the rates of its optimizer. The
          KeyError of a state that lacks a key says what was found and what to do. The original decides which
          older names will do.
Limits    a load that fails here leaves weights and optimizer state that were loaded before it.
Numbers   change after such a load, to those of a new scheduler that loads the same.
Cost      nothing in a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict, unpatched
from .._diagnosis import StandIn, answering_none, cannot_run, lacking, missing_attributes

MODULE = "megatron.core.optimizer_param_scheduler"
SCHEDULER = "OptimizerParamScheduler"
STEPS = "num_steps"
RATES = ("lr", "weight_decay")
"""The settings of the optimizer's groups that step() writes."""


def diagnose(module: ModuleType) -> Verdict:
    """Load a state of 5 steps into the real scheduler, which is at 3."""
    if missing := missing_attributes(f"{MODULE}:{SCHEDULER}", "load_state_dict", "state_dict", "step"):
        return lacking(missing)
    try:
        found = _steps_after_a_load(getattr(module, SCHEDULER))
    except Exception as error:
        return cannot_run(f"{SCHEDULER}.load_state_dict()", error)
    if found == [5, 5]:
        return Verdict(FIXED, "a scheduler that loads a checkpoint is at the checkpoint's step")
    if found == [5, 8]:
        return Verdict(NEEDED, "a scheduler adds the steps that it loads to its own")
    return Verdict(
        UNKNOWN, f"expected to load 5 steps as 5 or, after 3 steps, as 8; found {found[0]} and {found[1]}"
    )


def load_from_the_start(load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_state_dict)
    def patched_load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = dict(vars(self))
        rates = [(group, {name: group[name] for name in RATES if name in group}) for group in _groups(self)]
        setattr(self, STEPS, 0)
        try:
            return load_state_dict(self, *args, **kwargs)
        except BaseException as error:
            vars(self).update(before)
            for group, rate in rates:
                group.update(rate)
            if (explained := _of_a_state_that_lacks_a_key(error, self, *args, **kwargs)) is not None:
                raise explained from error
            raise

    return patched_load_state_dict


def _of_a_state_that_lacks_a_key(
    error: BaseException, scheduler: Any, state_dict: Any = None, *_: Any, **__: Any
) -> KeyError | None:
    """Return an error that explains this one; None if it is another. A KeyError, too: Megatron catches it."""
    if not (isinstance(error, KeyError) and error.args and isinstance(state_dict, Mapping)):
        return None
    if error.args[0] in state_dict:
        return None
    return KeyError(
        f"The checkpoint's learning rate schedule lacks {error.args[0]!r}. Found: {_names(state_dict)}. Expected: "
        f"{_names(scheduler.state_dict())}, or the names that older releases gave them. Schedule and rates are as "
        "before this load; weights and optimizer state may be loaded already. Load a complete checkpoint before "
        "you train on, or load this one without its schedule (in Megatron: --no-load-optim)."
    )


def _names(state: Mapping[Any, Any]) -> str:
    return ", ".join(map(str, state)) or "nothing"


def _groups(scheduler: Any) -> Any:
    groups = getattr(scheduler.optimizer, "param_groups", ())
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def _steps_after_a_load(kind: Any) -> list[int]:
    """Return the number of steps after a load of 5 into a scheduler at 0, and into one at 3."""
    optimizer = StandIn(param_groups=[])
    options = dict(
        init_lr=0.0, max_lr=1.0, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=20, start_wd=0.0, end_wd=0.0
    )
    found = []
    for steps in (0, 3):
        scheduler = object.__new__(answering_none(kind))
        vars(scheduler).update(
            options,
            optimizer=optimizer,
            num_steps=steps,
            lr_decay_style="constant",
            wd_incr_steps=1,
            wd_incr_style="constant",
            _check_and_set=lambda value, loaded, name: loaded,  # the real one logs
        )
        state = {**unpatched(kind.state_dict)(scheduler), STEPS: 5}
        unpatched(kind.load_state_dict)(scheduler, state)
        found.append(getattr(scheduler, STEPS))
    return found


PATCH = Patch(
    name="megatron.scheduler-after-load",
    doc=__doc__,
    upstream="https://github.com/NovaSky-AI/SkyRL/issues/2214",
    changes_numbers=True,
    sites=(Site(module=MODULE, diagnose=diagnose, replace={f"{SCHEDULER}.load_state_dict": load_from_the_start}),),
)
