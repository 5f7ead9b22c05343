"""megatron.scheduler-after-load on the real scheduler, in training at 2 ranks."""

import copy
import importlib
from functools import partial

import pytest
import torch
from rigs.cells import cells_of
from rigs.diagnosed_code import made_up, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.megatron.options import UNPATCHED, attempt, linear_schedule
from rigs.megatron.shapes import set_two_rates

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


def train(model, scheduler, steps, rates=lambda model: rates_of(model)[0]):
    """Return the learning rate and weight decay of each step."""
    found = []
    for step in steps:
        found.append(rates(model))
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


SETTINGS = {
    "another end": {"end_wd": 0.7},
    "another beginning": {"start_wd": 0.05, "end_wd": 0.1},
    "constant": {"start_wd": 0.6, "end_wd": 0.6, "wd_incr_style": "constant"},
    "the same": {"end_wd": 0.1},
}
LAYOUTS = {
    "fp32": {"lr": 0.5},
    "bf16": {"lr": 0.5, "dtype": "bf16", "use_distributed_optimizer": True, "optimizer": "adam"},
}


def resumed(layout, settings):
    """After three steps, load into a new schedule of other settings; two steps more, and those of the old one."""
    (model, scheduler), (other, its_own) = (
        (model, scheduler_of(model.optimizer)) for model in (tiny_gpt(**LAYOUTS[layout]) for _ in range(2))
    )
    for each in (model, other):
        set_two_rates(each.optimizer, 0.2)
    for each in ((model, scheduler), (other, its_own)):
        train(*each, range(SAVED))
    new = linear_schedule(other.optimizer, steps=20, max_lr=0.5, warm_up=2, **settings)
    new.load_state_dict(its_own.state_dict())
    steps = range(SAVED, SAVED + 2)
    expected, found = (train(*each, steps, rates_of) for each in ((model, scheduler), (other, new)))
    parameters, reference = other.parameters(), model.parameters()
    return expected, found, all(torch.equal(parameters[name], reference[name]) for name in reference)


def overridden():
    """Load a run's third step into a schedule that overrides its settings; and one that steps there itself."""
    flags = {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": False}
    own = {"steps": 20, "max_lr": 0.5, "warm_up": 2, "start_wd": 0.2, "end_wd": 0.7, **flags}
    saved = scheduler_of(tiny_gpt(lr=0.5).optimizer)
    saved.step(SAVED)
    new, itself = (linear_schedule(tiny_gpt(lr=0.5).optimizer, **own) for _ in range(2))
    new.load_state_dict(saved.state_dict())
    itself.step(SAVED)
    return rates_of(new) == rates_of(itself), new.state_dict() == itself.state_dict()


def rates_that_are_tensors():
    """Load a state that lacks its last key, with learning rates that step() writes into."""
    model = tiny_gpt(lr=0.5)
    scheduler = scheduler_of(model.optimizer)
    scheduler.step(SAVED)
    tensors = []
    for group in model.optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
        tensors.append(group["lr"])
    before = [tensor.clone() for tensor in tensors]
    state = {**scheduler.state_dict(), "num_steps": SAVED + 4}
    del state["end_wd"]
    error, _ = attempt(scheduler.load_state_dict, state)
    after = [group["lr"] for group in model.optimizer.param_groups]
    return error, all(map(torch.equal, before, after)), all(a is b for a, b in zip(tensors, after, strict=True))


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


def with_a_step_of_its_own():
    """Load into a schedule of the user's own class: the calls of its step()."""
    saved, calls = scheduler_of(tiny_gpt(lr=0.5).optimizer), []
    saved.step(SAVED)
    new = scheduler_of(tiny_gpt(lr=0.5).optimizer)

    class Own(type(new)):
        def step(self, increment):
            calls.append(increment)
            super().step(increment)

    new.__class__ = Own
    new.load_state_dict(saved.state_dict())
    return calls, new.num_steps


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
def resets_and_reads_late(self, state_dict):
    self.num_steps = 0
    self.step(increment=state_dict["num_steps"])
    self.end_wd = state_dict["end_wd"]


def resets_and_reads_first(self, state_dict):
    self.end_wd = state_dict["end_wd"]
    self.num_steps = 0
    self.step(increment=state_dict["num_steps"])


def diagnoses():
    from megapatch.patches.megatron.scheduler_after_load import diagnose

    module = importlib.import_module(MODULE)
    kind = module.OptimizerParamScheduler
    return verdicts_of(
        diagnose, module, made_up(kind, "load_state_dict", resets_and_reads_late, resets_and_reads_first)
    )


DIAGNOSES = {
    "resets_and_reads_late": ("needed", "the first step after a load"),
    "resets_and_reads_first": ("fixed", "so are its rates"),
}
LACKING = ["num_steps", "max_lr", "lr_decay_style", "end_wd", ""]
"""Keys that a state lacks; "" is one that has all, but no number of steps."""


def job(rank, world_size):
    init_parallel()
    yield "again", goes_again
    for lacking in LACKING:
        yield lacking, lambda lacking=lacking: fails(lacking)
    yield "older", older_names
    for layout in LAYOUTS:
        for case, settings in SETTINGS.items():
            yield (layout, case), partial(resumed, layout, settings)
    yield "overridden", overridden
    yield "own step", with_a_step_of_its_own
    yield "tensors", rates_that_are_tensors
    yield "diagnoses", diagnoses


unpatched = cells_of(job, 2, env=UNPATCHED)
patched = cells_of(job, 2)


@pytest.mark.quick
def test_without_the_patch_steps_add_up(unpatched):
    for found in unpatched:
        at, (rates, expected), equal = found["again"]
        assert at == [2 * SAVED + 4, 3 * SAVED + 4]
        assert rates != expected
        assert not equal


@pytest.mark.quick
def test_training_goes_the_same_way_again(patched):
    for found in patched:
        at, (rates, expected), equal = found["again"]
        assert at == [SAVED, SAVED]
        assert rates == expected
        assert equal


OTHER = [case for case in SETTINGS if case != "the same"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", OTHER)
def test_without_the_patch_the_first_step_has_the_weight_decay_of_the_schedule_before_the_load(
    unpatched, layout, case
):
    for found in unpatched:
        (expected, _), (first, second), equal = found[layout, case]
        assert [rate for rate, _ in first] == [rate for rate, _ in expected]
        assert [decay for _, decay in first] != [decay for _, decay in expected]
        assert second == found[layout, case][0][1]
        assert not equal


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", SETTINGS)
def test_the_first_step_is_that_of_a_run_that_was_not_interrupted(patched, layout, case):
    for found in patched:
        expected, steps, equal = found[layout, case]
        assert steps == expected
        assert len({decay for rates in expected for _, decay in rates}) > 1  # a schedule of weight decay
        assert equal


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_load_with_the_settings_of_the_checkpoint_stays_as_it_is(unpatched, patched, layout):
    for before, found in zip(unpatched, patched, strict=True):
        assert found[layout, "the same"] == before[layout, "the same"]


def test_a_schedule_that_overrides_keeps_its_own_settings(unpatched, patched):
    for found in (*unpatched, *patched):
        assert found["overridden"] == (True, True)


def test_a_step_of_the_users_own_is_called_as_before(unpatched, patched):
    for found in (*unpatched, *patched):
        assert found["own step"] == ([SAVED], SAVED)


def test_rates_that_are_tensors_are_put_back_in_place(patched):
    for found in patched:
        assert found["tensors"] == ("KeyError", True, True)


@pytest.mark.parametrize("lacking", LACKING)
def test_a_load_that_fails_changes_nothing(unpatched, patched, lacking):
    for before, found in zip(unpatched, patched, strict=True):
        error, changed, rates_kept = found[lacking]
        assert error == before[lacking][0] and error[0] is not None
        assert changed == [] and rates_kept
        assert before[lacking][2] == (lacking != "end_wd")  # it raises last


def test_older_names_are_loaded_as_before(unpatched, patched):
    for found in (*unpatched, *patched):
        assert found["older"] == [(True, True)] * 2


def test_diagnosis(patched):
    assert_verdicts(patched[0]["diagnoses"], DIAGNOSES)
