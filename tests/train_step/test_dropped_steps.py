"""A dropped TrainStep leaves nothing: the next step is, to the bit, that of a run in which it never began.

A step that was reduced is dropped by an error only until its optimizer has moved.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from rigs.cells import once, run_cells
from rigs.megatron.options import GRADS, Interrupted
from rigs.step_state import GLOBAL, MODELS, PLACES, SCALED, has_global_loss, held, interrupted, new_model
from rigs.train_step.models import MEAN, in_pieces, infinite_forward_step
from rigs.where import chosen, with_nightly

from megapatch._mcore.logged_losses import logged_losses
from megapatch._mcore.step_state import running_timers
from megapatch.testing import init_parallel
from megapatch.train_step import TrainStep

CUT = (2, 1)
EXPERTS = "expert bias"
REDUCED = ("reduced, then abort", "reduced, then in the optimizer")
LAST = ("in the body", "abort", "in the last call")
ENDS = (*LAST, *PLACES, *REDUCED)
RAISES_AT = {**{place: place for place in PLACES}, LAST[2]: "after finalize", REDUCED[1]: "in the optimizer"}


def stepped(model, step, number):
    with step:
        in_pieces(step, model, number, CUT, MEAN)
        return step.finish().grad_norm


def dropped(model, step, end, cut=CUT):
    context, function = (
        interrupted(model, RAISES_AT[end]) if end in RAISES_AT else (contextlib.nullcontext(), None)
    )
    with context, contextlib.suppress(Interrupted), step:
        in_pieces(step, model, 7, cut, MEAN, function=function, last=end in LAST)
        if end == "in the body":
            raise Interrupted
        if end in REDUCED:
            step.reduce()
        if end in ("abort", REDUCED[0]):
            step.abort()
            return
        (model.optimizer.step if end in REDUCED else step.finish)()
        raise AssertionError("the step was not interrupted")


def trained(name, end=None, **more):
    """Return the state after each step, and the parameters, of a run with a step dropped, or never begun."""
    model = new_model(name, **more)
    step = TrainStep(model.chunks, model.optimizer)
    found = []
    for number in range(3):
        if end is not None and number == 1:
            dropped(model, step, end)
            assert held(model) == found[-1][1], "right after the step was dropped"
        found.append((stepped(model, step, number), held(model)))
    return found, model.parameters()


def abandoned(name):
    """A step that nobody ended, and the step after it by another TrainStep."""
    model = new_model(name)
    step = TrainStep(model.chunks, model.optimizer)
    stepped(model, step, 0)
    step.begin()
    in_pieces(step, model, 7, CUT, MEAN)
    del step
    stepped(model, TrainStep(model.chunks, model.optimizer), 1)
    return held(model)[0], model.parameters()


def in_turns(name, between, cut=CUT):
    """A step of two calls, set aside between them while another is dropped; its gradients are carried over."""
    model = new_model(name)
    step, other = (TrainStep(model.chunks, model.optimizer) for _ in range(2))
    step.begin()
    in_pieces(step, model, 0, cut[:1], MEAN)
    if between:
        buffers = [buffer for chunk in model.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        gradients = [buffer.grad_data.clone() for buffer in buffers]
        step.set_aside()
        dropped(model, other, "in the last call", cut)
        for buffer, gradient in zip(buffers, gradients, strict=True):
            buffer.grad_data.copy_(gradient)
        step.take_up()
    in_pieces(step, model, 1, cut[1:], MEAN)
    step.finish()
    return held(model), model.parameters()


def set_aside_and_dropped(name):
    """Return the state after a step that was set aside and dropped, and that before it, without counts."""
    model = new_model(name)
    step = TrainStep(model.chunks, model.optimizer)
    stepped(model, step, 0)
    before = held(model)[1:]
    step.begin()
    in_pieces(step, model, 7, (2,), MEAN)
    step.set_aside()
    step.abort()
    return held(model)[1:], before


def aborted_after_a_turn(name):
    """Return buffers and loss scale after a step that was dropped after another's turn, and as that left them."""
    model = new_model(name)
    step, other = (TrainStep(model.chunks, model.optimizer) for _ in range(2))
    step.begin()
    in_pieces(step, model, 7, (2,), MEAN)
    step.set_aside()
    stepped(model, other, 0)
    left = held(model)[:2]
    step.take_up()
    in_pieces(step, model, 7, (1,), MEAN)
    step.abort()
    return held(model)[:2], left


def failing_after_the_optimizer(name):
    """Return buffers and loss scale after a step whose scheduler raises, and those after a whole step."""
    found = []
    for scheduler in (mock.Mock(**{"step.side_effect": Interrupted}), None):
        model = new_model(name)
        with contextlib.suppress(Interrupted), TrainStep(model.chunks, model.optimizer, scheduler) as step:
            in_pieces(step, model, 0, CUT, MEAN)
            step.finish(increment=1)
        found.append(held(model)[:2])
    return found


def timers_and_routes(name):
    """Return the timers that run, and routes to be replayed, after a step that has moved both and was dropped."""
    model = new_model(name)
    model.config.timers = importlib.import_module("megatron.core.timers").Timers(2, "minmax")
    model.config.timers("of the trainer").start()
    layer = model.chunks[0].module.decoder.layers[0]
    layer.router_replay = replay = SimpleNamespace(routes=[1], action=None)

    def forward(data, model):
        replay.routes.append(2)
        replay.action = "backward"
        raise Interrupted

    with contextlib.suppress(Interrupted), TrainStep(model.chunks, model.optimizer) as step:
        in_pieces(step, model, 7, CUT, MEAN, function=forward)
    return (running_timers(model.config.timers), vars(replay)), (
        {"of the trainer"},
        {"routes": [1], "action": None},
    )


def logged_beside(name, calls, clear=False):
    """Return what waits to be logged after a step of a model, around which one of another model is dropped."""
    one, other = new_model(name), new_model(name)
    step = TrainStep(one.chunks, one.optimizer)
    step.begin()
    for number, size in enumerate(calls):
        if number == 1:
            other.train_step(1, num_microbatches=2, **MEAN)
        in_pieces(step, one, 7, (size,), MEAN)
    if clear:  # as Megatron's log does
        for tensor in logged_losses():
            tensor.zero_()
    if len(calls) < 2:
        other.train_step(1, num_microbatches=2, **MEAN)
    step.abort()
    return [value for tensor in logged_losses() for value in tensor.tolist()]


# ------------------------------------------------------------------------ what the optimizer has moved stays
def steps(model):
    assert model.optimizer.step()[0]


def steps_each_part(model):
    for part in getattr(model.optimizer, "chained_optimizers", [model.optimizer]):
        part.step()


def overflows(model):
    assert not model.optimizer.step()[0]


def loads(model):
    model.optimizer.load_state_dict(model.optimizer.state_dict())


MOVES = {
    "steps": (EXPERTS, steps, None),
    "steps each part": (EXPERTS, steps_each_part, None),
    "overflows": (SCALED, overflows, infinite_forward_step),
    "loads": (EXPERTS, loads, None),
}


def state_after(name, move, function, with_error):
    """Return the state after a step that was reduced and whose optimizer has moved."""
    model = new_model(name)
    step = TrainStep(model.chunks, model.optimizer)
    with contextlib.suppress(Interrupted), step:
        in_pieces(step, model, 0, CUT, MEAN, function=function)
        step.reduce()
        move(model)
        if with_error:
            raise Interrupted
    if with_error:
        step.abort()
    return held(model), model.gradients(), model.parameters()


def compare_moved(*case):
    (state, *tensors), (expected, *expected_tensors) = (
        state_after(*case, with_error) for with_error in (True, False)
    )
    assert state == expected
    for found, other in zip(tensors, expected_tensors, strict=True):
        for name, value in other.items():
            torch.testing.assert_close(found[name], value, rtol=0.0, atol=0.0, equal_nan=True)
        assert any(value.any() for value in other.values())


def another_began():
    """The gradients and the state are those of the step that began since."""
    found = []
    for aborts in (True, False):
        model = new_model(EXPERTS)
        one, other = (TrainStep(model.chunks, model.optimizer) for _ in range(2))
        one.begin()
        in_pieces(one, model, 0, CUT, MEAN)
        one.reduce()
        other.begin()
        in_pieces(other, model, 1, CUT, MEAN)
        if aborts:
            one.abort()
        found.append((other.finish().grad_norm, held(model)))
    assert found[0] == found[1]


def ended_without_an_error():
    """The caller may step the optimizer after the `with`; the classes have their own methods then."""
    model = new_model(EXPERTS)
    own = [vars(kind).get("step") for kind in type(model.optimizer).__mro__]
    with TrainStep(model.chunks, model.optimizer) as step:
        in_pieces(step, model, 0, CUT, MEAN)
        step.reduce()
    assert [vars(kind).get("step") for kind in type(model.optimizer).__mro__] != own
    assert any(gradient.any() for gradient in model.gradients().values())
    assert model.optimizer.step()[0]
    assert [vars(kind).get("step") for kind in type(model.optimizer).__mro__] == own


# ------------------------------------------------------------------------ the cells
PROGRAMS = (set_aside_and_dropped, aborted_after_a_turn, failing_after_the_optimizer)
ALL = [*ENDS, "overlap", "abandoned", "in turns", *(one.__name__ for one in PROGRAMS), "others' log"]
NO_PAIRS = {(SCALED, "abandoned"), (SCALED, "in turns")}


def job(rank, world_size, wanted):
    init_parallel()
    for name in MODELS:
        if name == GLOBAL and not has_global_loss():
            continue
        never, with_overlap = once(trained, name), once(trained, name, **GRADS)
        cells = {
            **{end: partial(compare, never, name, end) for end in ENDS},
            "overlap": partial(compare, with_overlap, name, "after finalize", **GRADS),
            "abandoned": partial(compare_abandoned, name),
            "in turns": partial(compare_in_turns, name),
            **{program.__name__: partial(compare_two, program, name) for program in PROGRAMS},
            "others' log": partial(compare_log, name),
        }
        yield from (((name, end), cell) for end, cell in cells.items() if (name, end) in wanted)
    yield timers_and_routes.__name__, partial(compare_two, timers_and_routes, EXPERTS)
    for name, case in MOVES.items():
        yield name, partial(compare_moved, *case)
    yield "another began", another_began
    yield "ended", ended_without_an_error


def in_stages(rank, world_size):
    init_parallel(pp=2, vpp=2)
    yield "in turns", partial(compare_in_turns, EXPERTS, (2, 2))


def compare(never, name, end, **more):
    expected, parameters = never()
    found, own = trained(name, end, **more)
    assert found == expected
    assert_equal(own, parameters)
    assert expected[0][1] != expected[-1][1], "there is nothing to leave"


def compare_abandoned(name):
    buffers, parameters = abandoned(name)
    model = new_model(name)
    step = TrainStep(model.chunks, model.optimizer)
    for number in range(2):
        stepped(model, step, number)
    assert buffers == held(model)[0]
    assert_equal(parameters, model.parameters())


def compare_in_turns(name, cut=CUT):
    (holding, parameters), (expected, alone) = (in_turns(name, between, cut) for between in (True, False))
    assert holding == expected
    assert_equal(parameters, alone)


def compare_two(program, name):
    found, expected = program(name)
    assert found == expected


def compare_log(name):
    alone = logged_beside(name, ())
    assert any(alone)
    assert logged_beside(name, (2, 1)) == pytest.approx(alone, rel=1e-5)
    assert logged_beside(name, (2,)) == pytest.approx(alone, rel=1e-5)
    assert logged_beside(name, (1, 2), clear=True) == [0.0] * len(alone)


def assert_equal(parameters, expected):
    assert all(value.equal(expected[name]) for name, value in parameters.items())


@pytest.fixture(scope="module")
def ranks(request):
    return run_cells(job, 2, chosen(request, "name", "end"))


@pytest.mark.parametrize(
    ("name", "end"),
    with_nightly([pair for pair in itertools.product(MODELS, ALL) if pair not in NO_PAIRS]),
)
def test_a_dropped_step_leaves_nothing(ranks, name, end):
    for found in ranks:
        if name == GLOBAL and (name, end) not in found:
            pytest.skip("this Megatron has no global_aux_loss (from 0.15 on)")
        found[name, end]


def test_timers_and_routes_to_be_replayed_are_as_before(ranks):
    for found in ranks:
        found["timers_and_routes"]


@pytest.mark.parametrize("case", [*MOVES, "another began", "ended"])
def test_a_reduced_step_whose_optimizer_has_moved_is_not_dropped(ranks, case):
    for found in ranks:
        found[case]


def test_each_virtual_stage_has_the_counts_of_its_own_routers():
    for found in run_cells(in_stages, 2):
        found["in turns"]
