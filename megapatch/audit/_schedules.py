"""learning-rate-moves, schedule-once: the schedule advances as optimizer steps do.

Watches   step() of OptimizerParamScheduler, which must not advance after a step that Megatron has skipped, as it
          does after an fp16 overflow, unless another was made since it last advanced; and advances once a step in
          most trainers. A load that moves it does not count; the next step shows whether it has the steps that
          were loaded (loaded-is-there).
Limits    a schedule that is not an OptimizerParamScheduler is not seen, nor one that never advances.
Cost      nothing to speak of.
"""

from __future__ import annotations

import weakref
from typing import Any

from ..patch import Site
from ._audit import Audit, Part, Step
from ._findings import observes
from ._watching import RAISED, around, before, site


class Schedules(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._succeeded: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        """By optimizer that has stepped since its schedule advanced: whether a step of these was not skipped."""
        self._advanced: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers whose schedule has advanced since their last step."""
        self._is_loading = False
        self._loaded: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        """By schedule the steps that it was told to load, and those that it had then, until it advances or its
        optimizer steps."""
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def sites(self) -> tuple[Site, ...]:
        path = "OptimizerParamScheduler"
        return (
            site(
                "megatron.core.optimizer_param_scheduler",
                {
                    f"{path}.step": before(self._note_advance),
                    f"{path}.load_state_dict": around(self._begin_load, self._end_load),
                },
                expected={f"{path}.step": ("increment",)},
            ),
        )

    def of(self, optimizer: Any) -> list[Any]:
        """Return the schedules of an optimizer."""
        return [schedule for schedule in self._known if schedule.optimizer is optimizer]

    def was_loaded(self, schedule: Any) -> bool:
        """Return whether a schedule has been loaded since its optimizer's last step, and not advanced."""
        return schedule in self._loaded

    @observes
    def _note_advance(self, schedule: Any, increment: Any, *_: Any, **__: Any) -> None:
        if self._is_loading or type(schedule.optimizer).__hash__ is None:
            return  # the last is made up, by a diagnosis
        self._known.add(schedule)  # it makes a step of 0 as it is made
        if not increment:
            return
        self.ledger.judged.update(("learning-rate-moves", "schedule-once"))
        succeeded = self._succeeded.pop(schedule.optimizer, None)
        if succeeded is False:
            what = "the schedule advanced after a step that was skipped"
            self.ledger.report("learning-rate-moves", "after-skip", what)
        elif schedule.optimizer in self._advanced:
            what = "the schedule advanced twice after one optimizer step"
            self.ledger.report("schedule-once", "twice", what)
        self._advanced.add(schedule.optimizer)
        self._loaded.pop(schedule, None)

    def _begin_load(self, *_: Any, **__: Any) -> None:
        self._is_loading = True

    def _end_load(self, _: None, result: Any, schedule: Any, state_dict: Any, *__: Any, **___: Any) -> None:
        self._is_loading = False
        if result is not RAISED:
            self._note_load(schedule, state_dict)

    @observes
    def _note_load(self, schedule: Any, state_dict: Any) -> None:
        steps = state_dict.get("num_steps", state_dict.get("num_iters"))
        if steps is not None and type(schedule.optimizer).__hash__ is not None:
            self._loaded[schedule] = int(steps), int(schedule.num_steps)

    # ------------------------------------------------------------------------ judged in the step
    @observes
    def begin_step(self, step: Step) -> None:
        """Report schedules that are not where they were loaded."""
        for schedule in self.of(step.optimizer):
            now = int(schedule.num_steps)
            loaded, then = self._loaded.pop(schedule, (now, now))
            if now != loaded:
                what = f"the schedule is at {now} steps, and has loaded {loaded}"
                self.ledger.report("loaded-is-there", "schedule" if now == then else "rewound", what)

    @observes
    def end_step(self, step: Step) -> None:
        self._succeeded[step.optimizer] = self._succeeded.get(step.optimizer, False) or step.succeeded
        self._advanced.discard(step.optimizer)
