"""loaded-is-there, resumed-together, learning-rate-moves, schedule-once: an optimizer and its schedule.

Watches   load_state_dict() of Megatron's optimizers and load_parameter_state() of the distributed one, in all
          releases; and then their next step, as it begins. Loads of weights, by torch's
          Module.load_state_dict() or dist_checkpointing.load(), and reload_model_params() are events for the
          other parts. And step() of OptimizerParamScheduler: a scheduler must not advance if every step since it
          last advanced was skipped (fp16 overflow). Most trainers advance it once a step. A load that moves it
          does not count; the next step shows whether it has the steps that were loaded.
Limits    it knows that moments were loaded, not that they are the right ones. Moments that were there after the
          load, and are all zero now, were perhaps zeroed on purpose: a note (kept-between-steps). An optimizer
          without step counts, as SGD, is not judged, nor are Megatron-FSDP's. A schedule that is not an
          OptimizerParamScheduler is not seen, nor one that never advances.
Cost      reads moments twice after a load; nothing in other steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from .._mcore.main_params import has_memory
from ..patch import Site
from ._audit import Audit, Part, Step
from ._findings import observes, steps
from ._watching import RAISED, around, before, site

MOMENTS = ("exp_avg", "exp_avg_sq")
_STATE = "param_state"
"""Where the distributed optimizer has moments, on one rank or on all."""


class _Loaded(NamedTuple):
    """The state that an optimizer was to load.

    Attributes:
        steps: their counts.
        has_moments: whether there were any; None if only another rank knows.
        were_there: whether any moments were not zero after the load; None if that is not known.
        was_right: whether the step counts were those that were loaded, right after the load.
    """

    steps: set[int]
    has_moments: bool | None
    were_there: bool | None = None
    was_right: bool = False


class LoadedIsThere(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._loaded: weakref.WeakKeyDictionary[Any, _Loaded] = weakref.WeakKeyDictionary()
        """By optimizer, until its next step."""
        self._schedules: weakref.WeakSet[Any] = weakref.WeakSet()
        self._loaded_schedules: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        """By schedule the steps that it was told to load, and those that it had then, until it advances or its
        optimizer steps."""
        self._loads_schedule = False
        self._succeeded: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        """By optimizer that has stepped since its schedule advanced: whether a step of these was not skipped."""
        self._advanced: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """By optimizer whose schedule has advanced since its last step: how many steps there had been by then."""

    def sites(self) -> Iterator[Site]:
        load, package = "load_state_dict", "megatron.core.optimizer"
        watch_load, watch_optimizer = before(self._note_load), around(self._look, self._note_loaded)
        plain = (f"Float16OptimizerWithFloat16Params.{load}", f"FP32Optimizer.{load}")
        reload = {"MixedPrecisionOptimizer.reload_model_params": watch_load}
        yield site(f"{package}.optimizer", {**dict.fromkeys(plain, watch_optimizer), **reload})
        moments = {"DistributedOptimizer.load_parameter_state": around(self._note_load, self._note_moments)}
        yield site(f"{package}.distrib_optimizer", {f"DistributedOptimizer.{load}": watch_optimizer, **moments})
        yield site("torch.nn.modules.module", {f"Module.{load}": watch_load})
        yield site("megatron.core.dist_checkpointing.serialization", {"load": watch_load})
        step = "OptimizerParamScheduler.step"
        loading = {f"OptimizerParamScheduler.{load}": around(self._begin_schedule, self._end_schedule)}
        yield site(
            "megatron.core.optimizer_param_scheduler",
            {step: before(self._note_advance), **loading},
            expected={step: ("increment",)},
        )

    def _note_load(self, *_: Any, **__: Any) -> None:
        self.audit.loads += 1
        self.audit.disturbed("load")

    @observes
    def _look(self, optimizer: Any, state_dict: Any, *_: Any, **__: Any) -> _Loaded:
        """Look at what is loaded before it is taken apart."""
        self._note_load()
        inner = state_dict.get("optimizer", state_dict)  # an optimizer in fp32 saves torch's own state
        moments = list(_named_moments([inner.get("state", {}), state_dict.get(_STATE) or {}]))
        has_moments = any(bool(moment.any()) for moment in moments)
        return _Loaded(_steps_in(inner), None if _STATE in state_dict and not moments else has_moments)

    @observes
    def _note_loaded(self, loaded: _Loaded | None, result: Any, optimizer: Any, *_: Any, **__: Any) -> None:
        if loaded is not None and result is not RAISED:
            self.ledger.judged["loaded-is-there optimizers"] += 1
            was_right = not _steps_of(optimizer) - loaded.steps
            self._loaded[optimizer] = loaded._replace(were_there=_has_moments(optimizer), was_right=was_right)

    @observes
    def _note_moments(self, _: None, result: Any, optimizer: Any, *__: Any, **___: Any) -> None:
        if result is not RAISED and optimizer in self._loaded:
            were_there = _has_moments(optimizer)
            self._loaded[optimizer] = self._loaded[optimizer]._replace(has_moments=None, were_there=were_there)

    # ------------------------------------------------------------------------ schedules
    @observes
    def _note_advance(self, schedule: Any, increment: Any, *_: Any, **__: Any) -> None:
        if self._loads_schedule or type(schedule.optimizer).__hash__ is None:
            return  # the last is made up, by a diagnosis
        self._schedules.add(schedule)  # it makes a step of 0 as it is made
        if not increment:
            return
        self.ledger.judged.update(("learning-rate-moves", "schedule-once"))
        succeeded = self._succeeded.pop(schedule.optimizer, None)
        if succeeded is False:
            what = "the schedule advanced after a step that was skipped"
            self.ledger.report("learning-rate-moves", "after-skip", what)
        elif schedule.optimizer in self._advanced:
            kind, what = "twice", "the schedule advanced twice after one optimizer step"
            if others := self.ledger.step - self._advanced[schedule.optimizer]:
                kind, what = (
                    "left",
                    f"the schedule advanced, and its optimizer made none of the last {steps(others)}",
                )
            self.ledger.report("schedule-once", kind, what)
        self._advanced[schedule.optimizer] = self.ledger.step
        self._loaded_schedules.pop(schedule, None)

    def _begin_schedule(self, *_: Any, **__: Any) -> None:
        self._loads_schedule = True

    def _end_schedule(self, _: None, result: Any, schedule: Any, state_dict: Any, *__: Any, **___: Any) -> None:
        self._loads_schedule = False
        if result is not RAISED:
            self._note_schedule(schedule, state_dict)

    @observes
    def _note_schedule(self, schedule: Any, state_dict: Any) -> None:
        steps = state_dict.get("num_steps", state_dict.get("num_iters"))
        if steps is not None and type(schedule.optimizer).__hash__ is not None:
            self._loaded_schedules[schedule] = int(steps), int(schedule.num_steps)

    # ------------------------------------------------------------------------ judged in the step
    def begin_step(self, step: Step) -> None:
        schedules = [schedule for schedule in self._schedules if schedule.optimizer is step.optimizer]
        self._judge_loads(step, schedules)
        self._judge_schedules(schedules)

    @observes
    def _judge_loads(self, step: Step, schedules: list[Any]) -> None:
        """Report state that is missing."""
        was_any_loaded = any(part in self._loaded for part in step.optimizers)
        if not was_any_loaded and not any(schedule in self._loaded_schedules for schedule in schedules):
            return  # step counts may be on a GPU
        was_loaded, made = False, 0
        for optimizer in step.optimizers:
            loaded = self._loaded.pop(optimizer, None)
            made = max([made, *_steps_of(optimizer)])
            if loaded is not None and any(loaded.steps):
                was_loaded = True
                self._judge(optimizer, loaded)
        for schedule in schedules:
            self.ledger.judged["resumed-together"] += 1
            if was_loaded and made and not schedule.num_steps:
                what = f"the optimizer was loaded after {made} steps, and its schedule is at its beginning"
                self.ledger.report("resumed-together", "schedule", what)
            elif schedule in self._loaded_schedules and schedule.num_steps and not was_loaded:
                self._judge_beginning(schedule, made, step)

    def _judge_beginning(self, schedule: Any, made: int, step: Step) -> None:
        counts = [_counts_steps(optimizer) for optimizer in step.optimizers]
        if not made and any(counts):
            what = f"the schedule was loaded at {schedule.num_steps} steps, and its optimizer is at its beginning"
            self.ledger.report("resumed-together", "optimizer", what)

    def _judge(self, optimizer: Any, loaded: _Loaded) -> None:
        steps, are_there = _steps_of(optimizer), _has_moments(optimizer)
        if steps - loaded.steps:
            what = f"the optimizer has made {max(steps)} steps, and has loaded {max(loaded.steps)}"
            self.ledger.report("loaded-is-there", "rewound" if loaded.was_right else "steps", what)
        if are_there is False and loaded.were_there:
            what = "all moments were zeroed after a load of the optimizer"
            self.ledger.report("kept-between-steps", "zeroed", what)
        elif loaded.has_moments is False:
            what = f"the optimizer has loaded that it made {max(loaded.steps)} steps, and no moments"
            self.ledger.report("loaded-is-there", "empty", what)
        elif are_there is False:
            self.ledger.report("loaded-is-there", "moments", "all moments are zero after a load of the optimizer")

    @observes
    def _judge_schedules(self, schedules: list[Any]) -> None:
        """Report schedules that are not where they were loaded."""
        for schedule in schedules:
            now = int(schedule.num_steps)
            self.ledger.judged["loaded-is-there schedules"] += schedule in self._loaded_schedules
            loaded, then = self._loaded_schedules.pop(schedule, (now, now))
            if now != loaded:
                what = f"the schedule is at {now} steps, and has loaded {loaded}"
                self.ledger.report("loaded-is-there", "schedule" if now == then else "rewound", what)

    def end_step(self, step: Step) -> None:
        self._succeeded[step.optimizer] = self._succeeded.get(step.optimizer, False) or step.succeeded
        self._advanced.pop(step.optimizer, None)


# ------------------------------------------------------------------------ states of optimizers
def _named_moments(tree: Any) -> Iterator[Any]:
    """Yield the moments in a tree of dicts and lists."""
    import torch

    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, (dict, list)):
            yield from _named_moments(value)
        elif name in MOMENTS and type(value) is torch.Tensor:
            yield value


def _steps_in(inner: Any) -> set[int]:
    """Return the step counts in the state of torch's optimizer, as Megatron saves it."""
    state = inner.get("state", {})
    of_parameters = [each["step"] for each in state.values() if isinstance(each, dict) and "step" in each]
    common = [state["common_step"]] if "common_step" in state else []
    groups = [group["step"] for group in inner.get("param_groups", ()) if group.get("step") is not None]
    return {int(steps) for steps in common or of_parameters or groups}


def _steps_of(optimizer: Any) -> set[int]:
    """Return the step counts that torch's or Transformer Engine's optimizer has now."""
    inner = getattr(optimizer, "optimizer", None)
    return set() if inner is None else _steps_in({"state": inner.state, "param_groups": inner.param_groups})


def _counts_steps(optimizer: Any) -> bool:
    """Return whether an optimizer is one that counts steps, once it has made any."""
    inner = getattr(optimizer, "optimizer", None)
    return inner is not None and any("betas" in group for group in inner.param_groups)


def _has_moments(optimizer: Any) -> bool | None:
    """Return whether any moment is not zero; None if none can be looked at."""
    moments = [moment for moment in _named_moments(dict(optimizer.optimizer.state)) if has_memory(moment)]
    return any(bool(moment.any()) for moment in moments) if moments else None
