"""megatron.override-after-load: the learning rate of a resumed run, on the real optimizers, 2 ranks."""

import copy
import logging
from functools import partial
from types import SimpleNamespace

import pytest
from rigs.cells import cells_of
from rigs.log import Log
from rigs.megatron.options import UNPATCHED, attempt, linear_schedule
from rigs.megatron.save import minor
from rigs.megatron.shapes import set_two_rates

from megapatch.patches.megatron._param_groups import GROUPS
from megapatch.patches.megatron._rates_of_groups import (
    MORE,
    _with_rates_of_groups,
    keys_with_rates,
    with_rates_of_each,
)
from megapatch.patches.megatron.override_after_load import _group
from megapatch.testing import init_parallel, tiny_gpt

CASES = {
    "fp32": {},
    "bf16": {"dtype": "bf16", "tied_embeddings": True},
    "distributed": {"dtype": "bf16", "use_distributed_optimizer": True},
    "experts": {"dtype": "bf16", "use_distributed_optimizer": True, "experts": 2, "tied_embeddings": True},
}
OLD, NEW = 0.1, 0.01


def made(case, rate, **flags):
    model = tiny_gpt(optimizer="adam", lr=rate, optim={"min_lr": rate / 10}, **CASES[case])
    set_two_rates(model.optimizer, rate)
    scheduler = linear_schedule(model.optimizer, steps=10, max_lr=rate, min_lr=rate / 10, **flags)
    return model, scheduler


def resumed(case, rate, **flags):
    """Return the rates, after a load and a step more, of a run that has this rate; or what the load raises."""
    model, scheduler = made(case, OLD)
    model.train_step(0)
    scheduler.step(1)
    saved = copy.deepcopy((model.optimizer.state_dict(), scheduler.state_dict()))
    model, scheduler = made(case, rate, **flags)
    error, _ = attempt(model.optimizer.load_state_dict, saved[0])
    if error:
        return error
    scheduler.load_state_dict(saved[1])
    scheduler.step(1)
    return sorted({round(group["lr"], 9) for group in model.optimizer.param_groups})


OVERRIDE = {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": False}


def job(rank, world_size):
    init_parallel()
    for case in CASES:
        yield (case, "override"), partial(resumed, case, NEW, **OVERRIDE)
        yield (case, "checkpoint"), partial(resumed, case, NEW)
        yield (case, "same"), partial(resumed, case, OLD)


unpatched = cells_of(job, 2, env=UNPATCHED)
patched = cells_of(job, 2)


def after_two_steps(rate):
    return [round(own / 10 + (1 - 2 / 10) * (own - own / 10), 9) for own in (rate, 2 * rate)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick
def test_without_the_patch_the_rate_is_the_checkpoints_or_the_load_fails(unpatched, case):
    for found in unpatched:
        raised = "KeyError" if "use_distributed_optimizer" in CASES[case] else "ValueError"
        assert found[case, "override"] == (raised if minor() >= 19 else after_two_steps(OLD))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick
def test_with_the_flag_the_rate_is_the_runs_own(patched, case):
    for found in patched:
        assert found[case, "override"] == after_two_steps(NEW)


@pytest.mark.parametrize("case", CASES)
def test_without_the_flag_nothing_changes(unpatched, patched, case):
    for before, found in zip(unpatched, patched, strict=True):
        assert found[case, "same"] == before[case, "same"] == after_two_steps(OLD)
        assert found[case, "checkpoint"] == before[case, "checkpoint"]


def test_the_states_of_a_chain_belong_to_its_optimizers_in_the_order_of_their_keys():
    children = [SimpleNamespace(optimizer=SimpleNamespace(param_groups=[_group(max_lr=lr)])) for lr in (3.0, 4.0)]
    state = {1: {GROUPS: [_group(max_lr=2.0)]}, 0: {GROUPS: [_group(max_lr=1.0)]}}
    loaded = with_rates_of_each(children, state)
    assert [loaded[key][GROUPS][0]["max_lr"] for key in (0, 1)] == [3.0, 4.0]


def test_each_form_of_a_state_has_its_groups_and_all_else_is_loaded_as_it_is():
    own, none = (
        SimpleNamespace(optimizer=inner) for inner in (SimpleNamespace(param_groups=[_group(max_lr=3.0)]), None)
    )
    state, right = ({GROUPS: [_group(max_lr=lr)], "state": "moments"} for lr in (1.0, 3.0))
    forms = {
        "of the only one": ([own], state, right),
        "in a part": ([own], {"optimizer": state, "scaler": 1}, {"optimizer": right, "scaler": 1}),
        "in a list": ([own, own], [state, state], [right, right]),
        "without parameters": ([own, none], [state, {GROUPS: []}], [right, {GROUPS: []}]),
        "saved without parameters": ([own, own], {0: state, 1: None}, {0: right, 1: None}),
        "of others": ([own, own], [state], [state]),
        "none": ([own, own], 7, 7),
        "of another group": ([own], {GROUPS: [{**_group(max_lr=1.0), "wd_mult": 0.0}]}, ...),
    }
    for name, (children, saved, expected) in forms.items():
        assert with_rates_of_each(children, saved) == (saved if expected is ... else expected), name
    assert state[GROUPS] == [_group(max_lr=1.0)]


def test_groups_that_differ_in_their_rates_alone_are_loaded_as_before():
    state = {GROUPS: [_group(max_lr=1.0), _group(max_lr=2.0)]}
    assert _with_rates_of_groups([_group(max_lr=3.0), _group(max_lr=4.0)], state) == state
    one = {GROUPS: [_group(max_lr=1.0)]}
    assert _with_rates_of_groups([_group(max_lr=3.0), _group(max_lr=4.0)], one) == one
    assert _with_rates_of_groups([_group(max_lr=3.0)], state) == state


def test_a_rate_that_the_runs_own_group_leaves_to_its_scheduler_is_not_the_checkpoints():
    saved = _group(max_lr=1.0, min_lr=1.0, start_wd=1.0, end_wd=1.0)
    assert _with_rates_of_groups([_group()], {GROUPS: [saved]})[GROUPS] == [_group()]


KEYS = ("wd_mult",)


def groups(*rates, name="max_lr", **more):
    return [{"wd_mult": 1.0, "max_lr": 1.0, "min_lr": 0.0, **more, name: rate} for rate in rates]


@pytest.mark.parametrize(
    ("own", "saved", "more"),
    [
        (groups(0.0, 1.0, name="wd_mult", max_lr=2.0), groups(0.0, 1.0, name="wd_mult"), ()),
        (groups(1.0, 2.0), groups(1.0, 2.0), ("max_lr",)),
        (groups(0.0, 0.1, name="min_lr"), groups(0.0, 0.1, name="min_lr"), ("max_lr", "min_lr")),
        (
            groups(True, False, name="default_config", max_lr=3.0),
            groups(True, False, name="default_config"),
            MORE[:1],
        ),
        (groups(1.0, 2.0, default_config=True), groups(1.0, 2.0), ("max_lr",)),
        (groups(1.0, 2.0), groups(1.0, 2.0, default_config=True), ("max_lr",)),
        (groups(1.0, default_config=True), groups(1.0, 2.0, default_config=True), MORE),
        (groups(1.0, 3.0), groups(1.0, 2.0), None),
    ],
)
def test_groups_are_told_apart_by_no_more_than_it_takes_to_find_the_runs(own, saved, more):
    for state in ({GROUPS: saved}, {"optimizer": {GROUPS: saved}}):
        with Log(level=logging.WARNING) as log:
            assert keys_with_rates(KEYS, own, state) == KEYS + (more or ())
        assert ["[1.0, 2.0] and [1.0, 3.0]" in line for line in log.texts] == [True] * (more is None)
    assert keys_with_rates(KEYS, own, {"scaler": 1}) == keys_with_rates(KEYS, own, 7) == KEYS
