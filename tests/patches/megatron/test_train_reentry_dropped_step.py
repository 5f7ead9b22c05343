"""After an exception in a step of the real train(), nothing of that step is left outside of gradients either."""

import contextlib
from functools import partial
from unittest import mock

import pytest
from rigs.cells import cells_of, once
from rigs.megatron.options import Interrupted, needs_training, raising_half_way
from rigs.step_state import GLOBAL, SCALED, held, new_model

from megapatch.testing import Fault, MegatronLoop, init_parallel

pytestmark = needs_training

NAMES = (GLOBAL, SCALED)
PLACES = ("loss", "half of the backward", "after finalize", "in the optimizer")


def failing_in_the_second_step(model, place):
    """Return a context in which the second step of a call raises, and the fault to pass to train()."""
    if place == "loss":
        return contextlib.nullcontext(), Fault(Interrupted(), microbatch=3, place="loss")
    if place == "half of the backward":
        return raising_half_way(model, 3), None
    # The optimizer calls the first before anything else, and the second once it has found no overflow.
    name = {"after finalize": "prepare_grads", "in the optimizer": "step_with_ready_grads"}[place]
    original, calls = getattr(model.optimizer, name), iter(range(9))

    def function(*args, **kwargs):
        if next(calls) == 1:
            raise Interrupted
        return original(*args, **kwargs)

    return mock.patch.object(model.optimizer, name, function), None


def two_steps(name, place=None):
    """Return the state after one step in train() and after the next, with an interrupted one between, or none."""
    model = new_model(name, hooks=False)
    loop = MegatronLoop(model)
    if place is None:
        loop.train(1)
    else:
        context, fault = failing_in_the_second_step(model, place)
        with context, contextlib.suppress(Interrupted):
            loop.train(2, fault=fault)
            raise AssertionError("the call was not interrupted")
        loop.iteration += 1
    first = held(model)
    return first, loop.train(1), held(model), model.parameters()


def job(rank, world_size):
    init_parallel()
    for name in NAMES:
        never = once(two_steps, name)
        for place in PLACES:
            yield (name, place), partial(compare, never, name, place)


def compare(never, name, place):
    *expected, parameters = never()
    *found, own = two_steps(name, place)
    assert found == expected
    assert all(value.equal(parameters[name]) for name, value in own.items())


ranks = cells_of(job, 2)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_an_interrupted_step_leaves_nothing(ranks, name, place):
    for found in ranks:
        found[name, place]
