"""Steps of a plain loop that are given up: with overlap the next ones are as without it."""

import contextlib
import itertools
from functools import partial
from unittest import mock

import pytest
from rigs.cells import cells_of, once
from rigs.megatron.options import GRADS, UNPATCHED, Interrupted, attempt, raising_half_way
from rigs.step_state import GLOBAL, MODELS, has_global_loss, held, new_model

PLACES = ("backward", "before finalize", "before the reduce is settled")


def given_up(model, place):
    """Begin a step as a plain loop does, which raises."""
    context = {
        "backward": lambda: raising_half_way(model, 1),
        "before finalize": lambda: mock.patch.object(
            model.config, "finalize_model_grads_func", side_effect=Interrupted
        ),
        "before the reduce is settled": lambda: mock.patch.object(
            model.chunks[0], "finish_grad_sync", side_effect=Interrupted
        ),
    }[place]()
    model.zero_grad()
    with context, contextlib.suppress(Interrupted):
        model.forward_backward(7)
        raise AssertionError("the step was not interrupted")


def trained(name, place, options):
    model = new_model(name, **options)
    for step in range(3):
        if place is not None and step == 2:  # Megatron reduces in the backward pass from the second step on
            given_up(model, place)
        model.train_step(step)
    return held(model)[0], model.parameters()


def job(rank, world_size):
    from megapatch.testing import init_parallel

    init_parallel()
    for name in ("expert bias", GLOBAL):
        if name == GLOBAL and not has_global_loss():
            continue
        for place in PLACES:
            yield (name, place), partial(same, once(trained, name, place, {}), name, place)


def same(without_overlap, name, place):
    """Whether the run with overlap is, to the bit, the one without; or the error that ends it."""
    error, found = attempt(trained, name, place, GRADS)
    if error is not None:
        return error
    buffers, parameters = without_overlap()
    return found[0] == buffers and all(value.equal(parameters[key]) for key, value in found[1].items())


assert {"expert bias", GLOBAL} <= MODELS.keys()
ranks = cells_of(job, 2)
unpatched = cells_of(job, 2, env=UNPATCHED)


def cells(ranks):
    return [cell for cell in itertools.product(("expert bias", GLOBAL), PLACES) if cell in ranks[0]]


def test_the_next_step_is_as_without_overlap(ranks):
    for found in ranks:
        assert {cell: found[cell] for cell in cells(ranks)} == dict.fromkeys(cells(ranks), True)


@pytest.mark.thorough
def test_without_the_patch_it_is_an_error(unpatched):
    for found in unpatched:
        assert {cell: found[cell] for cell in cells(unpatched)} == dict.fromkeys(
            cells(unpatched), "AssertionError"
        )
