"""Steps of a plain loop that are given up: zeroing the gradients drops what else they have left in the model."""

import contextlib
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
        for overlap, options in {"": {}, "overlap": GRADS}.items():
            never = once(trained, name, None, options)
            for place in PLACES:
                yield (name, overlap, place), partial(same, never, name, place, options)


def same(never, name, place, options):
    """Whether the run is, to the bit, one in which the step never began; or the error that ends it."""
    error, found = attempt(trained, name, place, options)
    if error is not None:
        return error
    buffers, parameters = never()
    return found[0] == buffers and all(value.equal(parameters[key]) for key, value in found[1].items())


assert {"expert bias", GLOBAL} <= MODELS.keys()
ranks = cells_of(job, 2)
unpatched = cells_of(job, 2, env=UNPATCHED)


def cells(ranks):
    return [
        (name, overlap, place)
        for name in ("expert bias", GLOBAL)
        for overlap in ("", "overlap")
        for place in PLACES
        if (name, overlap, place) in ranks[0]
    ]


def test_the_next_step_is_that_of_a_run_in_which_it_never_began(ranks):
    for found in ranks:
        assert {cell: found[cell] for cell in cells(ranks)} == dict.fromkeys(cells(ranks), True)


@pytest.mark.thorough
def test_without_the_patch_it_is_not(unpatched):
    for found in unpatched:
        for name, overlap, place in cells(unpatched):
            if overlap:
                assert found[name, overlap, place] == "AssertionError"
            elif name == GLOBAL:
                assert found[name, overlap, place] is False  # silently
