"""A step that was reduced is dropped by an error only until its optimizer has moved; test_dropped_steps.py has
those that are dropped."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from rigs.cells import cells_of
from rigs.megatron.options import Interrupted
from rigs.step_state import SCALED, held, new_model
from rigs.train_step.models import MEAN, in_pieces, infinite_forward_step

from megapatch.testing import init_parallel
from megapatch.train_step import TrainStep

CUT = (2, 1)
BIAS = "expert bias"


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
    "steps": (BIAS, steps, None),
    "steps each part": (BIAS, steps_each_part, None),
    "overflows": (SCALED, overflows, infinite_forward_step),
    "loads": (BIAS, loads, None),
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


def compare(*case):
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
        model = new_model(BIAS)
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
    model = new_model(BIAS)
    own = [vars(kind).get("step") for kind in type(model.optimizer).__mro__]
    with TrainStep(model.chunks, model.optimizer) as step:
        in_pieces(step, model, 0, CUT, MEAN)
        step.reduce()
    assert [vars(kind).get("step") for kind in type(model.optimizer).__mro__] != own
    assert any(gradient.any() for gradient in model.gradients().values())
    assert model.optimizer.step()[0]
    assert [vars(kind).get("step") for kind in type(model.optimizer).__mro__] == own


def job(rank, world_size):
    init_parallel()
    for name, case in MOVES.items():
        yield name, partial(compare, *case)
    yield "another began", another_began
    yield "ended", ended_without_an_error


ranks = cells_of(job, 2)


@pytest.mark.parametrize("case", [*MOVES, "another began", "ended"])
def test_is_not_dropped(ranks, case):
    for found in ranks:
        found[case]
