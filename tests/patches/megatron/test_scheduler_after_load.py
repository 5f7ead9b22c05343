"""megatron.scheduler-after-load on the real scheduler, in training at 2 ranks."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from rigs.cells import cells_of
from rigs.diagnosed_code import made_up, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.megatron.options import UNPATCHED, attempt, linear_schedule

from megapatch.testing import init_parallel, tiny_gpt

MODULE = "megatron.core.optimizer_param_scheduler"
SAVED = 3
OLDER = {
    "max_lr": "start_lr",
    "lr_warmup_steps": "warmup_iter",
    "lr_decay_steps": "end_iter",
    "lr_decay_style": "decay_style",
    "num_steps": "num_iters",
}


def scheduler_of(optimizer):
    return linear_schedule(optimizer, steps=20, max_lr=0.5, warm_up=2, end_wd=0.1)


def train(model, scheduler, steps):
    """Return the learning rate and weight decay of each step."""
    found = []
    for step in steps:
        found.append(rates_of(model)[0])
        model.train_step(step)
        scheduler.step(1)
    return found


def goes_again():
    """Train, go back to an earlier state twice, and go on; and new objects that load it once."""
    model = tiny_gpt(lr=0.5)
    scheduler = scheduler_of(model.optimizer)
    train(model, scheduler, range(SAVED))
    saved = copy.deepcopy(([chunk.state_dict() for chunk in model.chunks], scheduler.state_dict()))
    train(model, scheduler, range(SAVED, SAVED + 4))
    at = []
    for _ in range(2):
        load(model, scheduler, saved)
        at.append(scheduler.num_steps)
    new = tiny_gpt(lr=0.5)
    of_new = scheduler_of(new.optimizer)
    load(new, of_new, saved)
    steps = range(SAVED, SAVED + 2)
    rates = train(model, scheduler, steps), train(new, of_new, steps)
    parameters, expected = model.parameters(), new.parameters()
    return at, rates, all(torch.equal(parameters[name], expected[name]) for name in expected)


def load(model, scheduler, saved):
    for chunk, state in zip(model.chunks, saved[0], strict=True):
        chunk.load_state_dict(state)
    scheduler.load_state_dict(saved[1])


def fails(lacking):
    """Load a state that lacks something: what raises, and what has changed."""
    model = tiny_gpt(lr=0.5)
    scheduler = scheduler_of(model.optimizer)
    scheduler.step(SAVED)
    state = {**scheduler.state_dict(), "num_steps": SAVED + 4}
    state = {name: value for name, value in state.items() if name != lacking}
    before, rates = dict(vars(scheduler)), rates_of(model)
    error = attempt(
        scheduler.load_state_dict, {**state, **({} if lacking else {"max_lr": 7.0, "num_steps": None})}
    )
    changed = [name for name, value in vars(scheduler).items() if value is not before[name]]
    return error, changed, rates_of(model) == rates


def older_names():
    """Load states as older releases of Megatron wrote them, whose schedules lack today's keys."""
    found = []
    for lacks in ((), ("start_wd", "end_wd", "wd_incr_steps", "wd_incr_style")):
        model = tiny_gpt(lr=0.5)
        scheduler = scheduler_of(model.optimizer)
        scheduler.step(SAVED)
        state = {name: value for name, value in scheduler.state_dict().items() if name not in lacks}
        new = scheduler_of(tiny_gpt(lr=0.5).optimizer)
        new.load_state_dict({OLDER.get(name, name): value for name, value in state.items()})
        found.append((new.state_dict() == scheduler.state_dict(), rates_of(new) == rates_of(scheduler)))
    return found


def rates_of(model):
    """Return the rates of a model's optimizer, or of a scheduler's."""
    return [(group["lr"], group["weight_decay"]) for group in model.optimizer.param_groups]


# ------------------------------------------------------------------------------------------ the diagnosis
def resets(self, state_dict):
    self.num_steps = 0
    self.step(increment=state_dict["num_steps"])


def adds(self, state_dict):
    self.step(increment=state_dict["num_steps"])


def stays(self, state_dict): ...


def diagnoses():
    from megapatch.patches.megatron.scheduler_after_load import diagnose

    module = importlib.import_module(MODULE)
    kind = module.OptimizerParamScheduler
    return verdicts_of(
        diagnose,
        module,
        {
            **made_up(kind, "load_state_dict", resets, adds, stays),
            "no class": (module, "OptimizerParamScheduler", None),
        },
    )


DIAGNOSES = {
    "as it is": ("needed", "adds the steps"),
    "resets": ("fixed", "checkpoint's step"),
    "adds": ("needed", "adds the steps"),
    "stays": ("unknown", "found 0 and 3"),
    "no class": ("unknown", "OptimizerParamScheduler"),
}
LACKING = ["num_steps", "max_lr", "lr_decay_style", "end_wd", ""]
"""Keys that a state lacks; "" is one that has all, but no number of steps."""


def job(rank, world_size):
    init_parallel()
    yield "again", goes_again
    for lacking in LACKING:
        yield lacking, lambda lacking=lacking: fails(lacking)
    yield "older", older_names
    yield "diagnoses", diagnoses


unpatched = cells_of(job, 2, env=UNPATCHED)
patched = cells_of(job, 2)


def test_without_the_patch_steps_add_up(unpatched):
    for found in unpatched:
        at, (rates, expected), equal = found["again"]
        assert at == [2 * SAVED + 4, 3 * SAVED + 4]
        assert rates != expected
        assert not equal


def test_training_goes_the_same_way_again(patched):
    for found in patched:
        at, (rates, expected), equal = found["again"]
        assert at == [SAVED, SAVED]
        assert rates == expected
        assert equal


@pytest.mark.parametrize("lacking", LACKING)
def test_a_load_that_fails_changes_nothing(unpatched, patched, lacking):
    for before, found in zip(unpatched, patched, strict=True):
        (error, _), changed, rates_kept = found[lacking]
        assert error == before[lacking][0][0] is not None
        assert changed == [] and rates_kept
        assert before[lacking][2] == (lacking != "end_wd")  # it raises last


@pytest.mark.parametrize("lacking", [lacking for lacking in LACKING if lacking])
def test_a_state_that_lacks_a_key_is_explained(unpatched, patched, lacking):
    for before, found in zip(unpatched, patched, strict=True):
        assert before[lacking][0] == ("KeyError", f"{lacking!r}")
        error, text = found[lacking][0]
        assert error == "KeyError"
        for part in (f"lacks {lacking!r}. Found: ", "Expected: ", "before this load", "Load a complete"):
            assert part in text


def test_another_error_stays_as_it_is(unpatched, patched):
    assert [found[""][0] for found in patched] == [found[""][0] for found in unpatched]


def test_older_names_are_loaded_as_before(unpatched, patched):
    for found in (*unpatched, *patched):
        assert found["older"] == [(True, True)] * 2


def test_diagnosis(unpatched, patched):
    assert unpatched[0]["diagnoses"] == patched[0]["diagnoses"]
    assert_verdicts(patched[0]["diagnoses"], DIAGNOSES)
