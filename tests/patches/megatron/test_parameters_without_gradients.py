"""Steps in which some parameters get no gradient, on some ranks or on all: reduced in full, in one order.

A layer whose output is not used gets none. The reference is the same run without overlap, where Megatron
reduces everything at the end of the step.
"""

import contextlib
import functools
import itertools
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from rigs.cells import cells_of, once, run_cells
from rigs.megatron.gathers import between_ranks
from rigs.megatron.options import assert_same_parameters, attempt
from rigs.train_step.layouts import BOTH, GRADS, INSTANCES, SHARDED, TWO_INSTANCES
from rigs.train_step.models import MEAN, in_pieces
from rigs.where import chosen, with_nightly

from megapatch import apply, restore
from megapatch.patches.megatron import parameters_without_gradients
from megapatch.patches.megatron.parameters_without_gradients import Line
from megapatch.testing import init_parallel, tiny_gpt
from megapatch.train_step import TrainStep

PATCH = "megatron.parameters-without-gradients"
STEPS = 5
LAYERS = 4
UNUSED = {  # the layers that data-parallel rank `rank` does not use in a step
    "never": lambda rank, step: {1},
    "on one rank only": lambda rank, step: {2} if rank == 1 and step in (1, 3) else set(),
    "in turns": lambda rank, step: {(rank + step) % LAYERS},
    "from the second step on": lambda rank, step: {1} if step else set(),
    "in the first step": lambda rank, step: {(3, 0)[rank % 2]} if step == 0 else set(),
    "always": lambda rank, step: set(),
}
LAYOUTS = {  # number of ranks, layout, options with overlap, options without
    "dp2": (2, {}, GRADS, {}),
    "dp2, both": (2, {}, BOTH, SHARDED),
    "dp4, two instances": (4, TWO_INSTANCES, INSTANCES, {**INSTANCES, "overlap_grad_reduce": False}),
    "pp2 dp2": (4, {"pp": 2}, {**GRADS, "align_grad_reduce": False}, {}),
    "pp2 vpp2 dp2": (4, {"pp": 2, "vpp": 2}, {**GRADS, "align_grad_reduce": False}, {}),
    "pp2 vpp2 dp2, aligned": (4, {"pp": 2, "vpp": 2}, GRADS, {}),
}


def not_using(model, layers):
    """Run the layers of these numbers, from 0 on, but pass on what they were given."""
    stack = contextlib.ExitStack()
    for layer in layers_of(model):
        if layer.layer_number - 1 in layers:
            stack.enter_context(mock.patch.object(layer, "forward", partial(_pass_on, layer.forward)))
    return stack


def layers_of(model):
    return [layer for chunk in model.chunks for layer in chunk.module.decoder.layers]


def _pass_on(forward, hidden_states, *args, **kwargs):
    with torch.no_grad():
        forward(hidden_states, *args, **kwargs)
    return hidden_states, None


def trained(options, case, cut=None, last=False, frozen=None, late=False, zeroed_last=False):
    """By step: the gradient norm, and the parameters at the end. With a cut, in pieces of a TrainStep.

    frozen   the number of a layer that is frozen when its parameters have their places in bucket groups already
    late     whether the patches are applied once the model is made
    zeroed_last   whether gradients are zeroed after each step, and not before, as in ROLL
    """
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    if late:
        restore()
    model = tiny_gpt(**{**options, "layers": LAYERS, "lr": 0.1})
    if late:
        apply()
    for layer in layers_of(model):
        layer.requires_grad_(layer.layer_number - 1 != frozen)
    step = TrainStep(model.chunks, model.optimizer)
    norms = []
    for number in range(STEPS):
        with not_using(model, UNUSED[case](rank, number)):
            if zeroed_last:
                model.forward_backward(number, num_microbatches=4, **MEAN)
                norms.append(float(model.optimizer.step()[1]))
                model.zero_grad()
                continue
            if cut is None:
                norms.append(model.train_step(number, num_microbatches=4, **MEAN).grad_norm)
                continue
            with step:
                in_pieces(step, model, number, cut, MEAN, last=last)
                norms.append(step.finish().grad_norm)
    model.gather_parameters()
    return norms, model.parameters()


def found_by(rank, world_size, wanted):
    """The pairs of a layout and a case that are wanted; in pieces, if that is wanted without a case."""
    names = {name for name, _ in wanted}
    for name, (ranks, layout, overlapping, plain) in LAYOUTS.items():
        if ranks != world_size or name not in names:
            continue
        init_parallel(**layout)
        expected = {case: once(trained, plain, case) for case in UNUSED}
        for case in [case for case in UNUSED if (name, case) in wanted]:
            yield (name, case), partial(pair, overlapping, expected[case], case)
        if (name, None) in wanted:
            for last in (False, True):
                yield (
                    (name, "in turns", last),
                    partial(pair, overlapping, expected["in turns"], "in turns", (1, 3), last),
                )


def found_apart(rank, world_size):
    init_parallel()
    in_turns = once(trained, {}, "in turns")
    yield "zeroed at the end", lambda: (trained(GRADS, "in turns", zeroed_last=True), in_turns())
    # Layer 3 comes before layer 2 in the backward pass, and so in the order of the reduces.
    yield (
        "frozen",
        partial(pair, GRADS, partial(trained, {}, "on one rank only", frozen=3), "on one rank only", frozen=3),
    )
    yield "made before", lambda: (trained(GRADS, "in turns", late=True), in_turns())
    yield "all-reduced", all_reduced
    yield "started twice", started_twice
    yield "overlap", partial(early_starts, "on one rank only")
    init_parallel(ep=2)
    experts, late = {"experts": 2}, "from the second step on"
    yield "experts", partial(pair, {**GRADS, **experts}, partial(trained, experts, late), late)


def pair(overlapping, expected, case, cut=None, last=False, frozen=None):
    return trained(overlapping, case, cut, last, frozen), expected()


def all_reduced():
    """Return, by step, how much of the gradient differs between ranks where all of it is reduced on each of them.

    That is what Megatron's train_step() does when gradients are to be saved, with a distributed optimizer, too.
    """
    from megatron.core.distributed import finalize_model_grads

    model = tiny_gpt(layers=LAYERS, **{**SHARDED, **GRADS})
    (chunk,) = model.chunks
    if not hasattr(chunk, "force_all_reduce"):
        return None
    chunk.force_all_reduce = True
    model.config.finalize_model_grads_func = lambda *args, **kwargs: finalize_model_grads(
        *args, **{**kwargs, "force_all_reduce": True}
    )
    found = []
    for number in range(STEPS):
        model.zero_grad()
        with not_using(model, UNUSED["on one rank only"](torch.distributed.get_rank(), number)):
            model.forward_backward(number, num_microbatches=2)
        found.append(between_ranks(model.gradients()))
    return found


def started_twice():
    """Return the error of a reduce that is started while it is under way, once Megatron has learned the order."""
    model = tiny_gpt(layers=LAYERS, **GRADS)
    (chunk,) = model.chunks
    model.train_step(0)
    model.zero_grad()
    for group in chunk.bucket_groups:
        group.start_grad_sync()
    error, _ = attempt(chunk.bucket_groups[0].start_grad_sync)
    chunk.finish_grad_sync()
    return error


def early_starts(case):
    """Return, by step, how many bucket groups are being reduced before finish_grad_sync(); and their number."""
    model = tiny_gpt(layers=LAYERS, **GRADS)
    (chunk,) = model.chunks
    finish, found = chunk.finish_grad_sync, []

    def finished(*args, **kwargs):
        found.append(sum(group.grad_reduce_handle is not None for group in chunk.bucket_groups))
        return finish(*args, **kwargs)

    chunk.finish_grad_sync = finished
    for number in range(STEPS):
        model.zero_grad()
        with not_using(model, UNUSED[case](torch.distributed.get_rank(), number)):
            model.forward_backward(number, num_microbatches=2)
    return found, len(chunk.bucket_groups)


@pytest.fixture(scope="module")
def of_ranks(request):
    """Return a function of the number of ranks that returns what each of them found, of the cases wanted."""
    wanted = chosen(request, "name", "case")
    return functools.cache(lambda ranks: run_cells(found_by, ranks, wanted))


apart = cells_of(found_apart, 2)


FIRST, *OTHERS = LAYOUTS  # with every Megatron the first, with the newest all
IN_OTHERS = with_nightly(list(itertools.product(OTHERS, UNUSED)))
WITHOUT_VIRTUAL_STAGES = [
    pytest.param(name, marks=pytest.mark.thorough if name in OTHERS else ())
    for name, (_, layout, *_) in LAYOUTS.items()
    if not layout.get("vpp")
]


@pytest.mark.parametrize(("name", "case"), list(itertools.product([FIRST], UNUSED)))
@pytest.mark.quick
def test_every_step_is_as_without_overlap(of_ranks, name, case):
    for found in of_ranks(LAYOUTS[name][0]):
        assert_same(*found[name, case])


@pytest.mark.parametrize(("name", "case"), IN_OTHERS)
@pytest.mark.thorough
def test_in_other_layouts_it_is_too(of_ranks, name, case):
    for found in of_ranks(LAYOUTS[name][0]):
        assert_same(*found[name, case])


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", WITHOUT_VIRTUAL_STAGES)
def test_in_pieces_of_a_train_step(of_ranks, name, last):
    for found in of_ranks(LAYOUTS[name][0]):
        assert_same(*found[name, "in turns", last])


def test_experts_that_get_no_gradient_are_reduced_too(apart):
    for found in apart:
        assert_same(*found["experts"])


def test_a_first_step_that_nothing_zeroes_before(apart):
    """Up to 0.15 it needs the chunk to have been lined up when it was made."""
    for found in apart:
        assert_same(*found["zeroed at the end"])


def test_groups_with_frozen_parameters_are_reduced_last_on_every_rank(apart):
    """On a rank that has all other gradients they are, so they must be on one that lacks some."""
    for found in apart:
        assert_same(*found["frozen"])


def test_a_model_that_was_made_before_the_patch_was_applied(apart):
    for found in apart:
        assert_same(*found["made before"])


def test_gradients_to_be_saved_are_whole_on_every_rank(apart):
    for found in apart:
        if found["all-reduced"] is None:
            pytest.skip("this Megatron cannot reduce them in full (to 0.15)")
        assert found["all-reduced"] == [0] * STEPS


def test_a_reduce_that_is_started_twice_is_megatrons_own_error(apart):
    for found in apart:
        assert found["started twice"] == "AssertionError"


def assert_same(got, expected):
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    assert_same_parameters(got[1], expected[1])


def test_groups_before_the_one_that_waits_overlap_as_ever(apart):
    full, part = (found["overlap"] for found in apart)
    early, groups = full
    # The first step is Megatron's for learning, from 0.16 on; in the third and fifth, all have their gradients.
    assert early[2] == early[4] == groups
    assert 0 < part[0][3] < groups


def without(rank, world_size):
    init_parallel()
    yield "never", partial(attempt, trained, GRADS, "never")


@pytest.mark.quick
def test_without_the_patch_the_step_ends_with_an_error():
    for found in run_cells(without, 2, env={"MEGAPATCH_DISABLE": PATCH}):
        error, _ = found["never"]
        assert error == "AssertionError"


def silently(rank, world_size):
    init_parallel(**TWO_INSTANCES)
    case = "from the second step on"
    *_, overlapping, plain = LAYOUTS["dp4, two instances"]
    yield "instances", partial(pair, overlapping, partial(trained, plain, case), case)


@pytest.mark.thorough
def test_without_the_patch_several_instances_leave_gradients_unreduced_and_nobody_says_so():
    for found in run_cells(silently, 4, env={"MEGAPATCH_DISABLE": PATCH}):
        (norms, _), (expected, _) = found["instances"]
        assert norms[0] == pytest.approx(expected[0], rel=1e-5)
        assert all(abs(norm / right - 1) > 0.01 for norm, right in zip(norms[1:], expected[1:], strict=True))


class Group:
    """A bucket group that notes in which order it and others are started."""

    def __init__(self, name, order, is_frozen=False, **attributes):
        self.name, self.order = name, order
        self.params = [SimpleNamespace(requires_grad=not is_frozen)]
        vars(self).update(attributes)

    def start_grad_sync(self):
        self.order.append(self.name)


FIRST_STEP = {"is_first_batch": True}


@pytest.mark.parametrize(
    ("kinds", "calls", "expected"),
    [
        ({}, ["b", "a", "all"], ["", "ab", ""]),
        ({}, ["b", "all"], ["", "ab"]),
        ({}, ["hand b", "a", "all"], ["b", "a", ""]),
        ({}, ["b", "finish b", "a", "all"], ["", "b", "a", ""]),
        ({}, ["a", "finish a", "b", "all"], ["a", "", "b", ""]),
        ({}, ["a", "b", "finish a", "a", "all"], ["a", "b", "", "a", ""]),
        (FIRST_STEP, ["a", "b", "finish a", "finish b", "b", "a", "a"], ["a", "b", "", "", "", "ab", ""]),
        ({}, ["finish b", "a", "b", "finish a", "b"], ["", "a", "b", "", "b"]),
        ({}, ["b", "zero", "a", "b"], ["", "", "a", "b"]),
        ({}, ["a", "a"], ["a", "a"]),
        ({"is_first_batch": False}, ["a", "a"], ["a", "a"]),
        (FIRST_STEP, ["a", "b", "a", "finish a", "a"], ["a", "b", "", "", "a"]),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, list) else "",
)
def test_groups_start_in_their_order_unless_by_hand(kinds, calls, expected, monkeypatch):
    order, found = [], []
    groups = {name: Group(name, order, **kinds) for name in "ab"}
    line = Line(list(groups.values()))
    for call in calls:
        how, _, name = call.rpartition(" ")
        monkeypatch.setattr(parameters_without_gradients, "_in_backward_pass", lambda how=how: not how)
        if name == "all":
            for group in groups.values():
                monkeypatch.setattr(group, "start_grad_sync", partial(line.start, group, Group.start_grad_sync))
            line.start_all({})
        elif name == "zero":
            line.begin()
        elif how == "finish":
            with line.finishing(groups[name]):
                pass
        else:
            line.start(groups[name], Group.start_grad_sync)
        found.append("".join(order))
        order.clear()
    assert found == expected


def test_a_partly_frozen_group_that_gets_its_gradients_is_started_at_once(monkeypatch):
    monkeypatch.setattr(parameters_without_gradients, "_in_backward_pass", lambda: True)
    order = []
    first, second = groups = [Group("first", order, is_frozen=True), Group("second", order)]
    line = Line([Group("of a chunk that is gone", order), *groups])
    for group in (second, first):
        line.start(group, Group.start_grad_sync)
    assert order == ["second", "first"]
