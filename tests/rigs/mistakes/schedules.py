"""Mistakes with the schedule."""

from __future__ import annotations

from rigs.megatron.options import linear_schedule
from rigs.mistakes import Table, other_optimizer
from rigs.mistakes.losses import FP16, losses_times

SCHEDULE = Table("the schedule")


def schedule_of(model):
    model.schedule = getattr(model, "schedule", None) or linear_schedule(model.optimizer, steps=9, max_lr=0.1)
    return model.schedule


def new_schedule_of(model):
    """Return a new schedule, which has loaded what the model's own has saved."""
    saved, model.schedule = schedule_of(model).state_dict(), None
    schedule_of(model).load_state_dict(saved)
    return model.schedule


@SCHEDULE.row("advances after an overflow", {"learning-rate-moves": 1}, **FP16)
def schedule_moves_after_an_overflow(model, step):
    schedule = schedule_of(model)
    model.zero_grad()
    with losses_times(float("inf")):
        model.forward_backward(step)
    model.optimizer.step()
    schedule.step(1)


@SCHEDULE.row("advances twice a step", {"schedule-once": 1})
def schedule_moves_twice(model, step):
    schedule = schedule_of(model)
    model.train_step(step)
    schedule.step(1)
    schedule.step(1)


@SCHEDULE.row("is that of an earlier optimizer", {"schedule-once": 2})
def schedule_of_an_earlier_optimizer(model, step):
    """The optimizer is made again, and the schedule is not."""
    schedule = schedule_of(model)
    model.optimizer = other_optimizer(model) if step == 0 else model.optimizer
    model.train_step(step)
    schedule.step(1)


@SCHEDULE.row("never advances", {}, why="trainers advance it once for many steps")
def schedule_never_moves(model, step):
    schedule_of(model)
    model.train_step(step)
