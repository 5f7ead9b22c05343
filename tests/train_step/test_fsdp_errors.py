"""Failures in a step on FSDP2, at 2 ranks: after an exception in the middle of a pass the next step is a
fresh one; wrong use is told, on all ranks."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
from rigs.cells import run_cells
from rigs.megatron.options import assert_misuse
from rigs.train_step.fsdp import (
    Interrupted,
    Sharded,
    device_mesh,
    forward_step,
    largest_difference,
    optimizers,
    plain_model,
    reference,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from megapatch.errors import MisuseError
from megapatch.train_step import TrainStep

pytestmark = pytest.mark.thorough  # needs no Megatron at all
FIRST = ("before the model", "forward", "backward")  # also in the first pass ever
CUT = ((1, 2), (2, 1))
PLACES = (
    "before the model",
    "forward",
    "backward",
    "second backward",
    "loss",
    "body",
    "optimizer",
    "own optimizer",
    "abort",
)


def attempt(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except (Interrupted, MisuseError) as error:
        return type(error).__name__, str(error)
    return None, None


def interrupted_step(sharded, step, place):
    """Ends in the middle, in the same place on all ranks."""

    def before_the_model(data, model):
        raise Interrupted

    functions = {
        "before the model": before_the_model,
        "loss": forward_step(False, raises_in_loss=True),
    }
    with sharded.train_step as train_step:
        if place == "second backward":  # the gradients of the first are there
            sharded.calls(step, CUT)
        sharded.model.raises_in = place.removeprefix("second ") if place.endswith("ward") else None
        sharded.calls(step, CUT, functions.get(place))
        if place == "body":
            raise Interrupted
        if place.endswith("optimizer"):
            sharded.optimizer.register_step_pre_hook(interrupting)
            if place == "optimizer":
                train_step.finish()
            train_step.reduce()
            sharded.optimizer.step()
        train_step.abort()


def interrupting(*args):
    raise Interrupted


def recovered(rank, place, earlier_steps):
    """The error; whether the model is at rest after it; norm and state after the next step."""
    sharded = Sharded(rank)
    for step in range(earlier_steps):
        sharded.step(step, CUT)
    error, _ = attempt(interrupted_step, sharded, 8, place)
    sharded.model.raises_in = None
    sharded.optimizer._optimizer_step_pre_hooks.clear()
    at_rest = sharded.is_at_rest()
    result = sharded.step(earlier_steps, CUT)
    return error, at_rest, result.grad_norm, sharded.state()


def all_recovered(rank):
    found = {(place, 1): recovered(rank, place, 1) for place in PLACES}
    return found | {(place, 0): recovered(rank, place, 0) for place in FIRST}


def without_reset_iter_state(rank):
    """As with a torch that has no FSDPModule.reset_iter_state()."""
    before = getattr(FSDPModule, "reset_iter_state", None)
    if before is not None:
        del FSDPModule.reset_iter_state
    try:
        return all_recovered(rank)
    finally:
        if before is not None:
            FSDPModule.reset_iter_state = before


def misuses(sharded):
    """By name: what ends in an error on both ranks."""
    step, rank = sharded.train_step, sharded.rank

    def opened(function, *args):
        step.begin()
        function(*args)

    def by_hand(passes, *numbers):
        with step.accumulate(numbers[rank]) as backward:
            for inputs, *_ in sharded.pieces(0, ((4, 4),))[0][:passes]:
                backward(sharded.model(inputs).sum())

    def three_values(data, model):
        output, _ = forward_step(False)(data, model)
        return output, lambda output: (output.sum(), 1, {})

    def no_gradient():
        sharded.calls(0, CUT)
        with mock.patch.dict(sharded.optimizer.param_groups[0], params=[]):
            step.finish()

    def several_factors():
        sharded.calls(0, CUT)
        sharded.model.layers[0].set_gradient_divide_factor(2.5)  # with gloo no pass can be made with it
        try:
            step.finish()
        finally:
            sharded.model.layers[0].set_gradient_divide_factor(None)

    def in_between(call):
        with step:
            sharded.calls(0, CUT)
            call()

    return {
        "step of one's own": lambda: in_between(sharded.optimizer.step),
        "zero_grad of one's own": lambda: in_between(lambda: sharded.optimizer.zero_grad()),
        "too few passes": lambda: opened(by_hand, 1, 1, 2),
        "too many passes": lambda: opened(by_hand, 3, 1, 2),
        "no pass": lambda: opened(by_hand, 0, 1, 2),
        "a rank without data": lambda: opened(sharded.calls, 0, ((2, 0),)),
        "no microbatch": lambda: (opened(sharded.calls, 0, ((0, 0),)), step.finish()),
        "no call": lambda: opened(step.finish),
        "three values": lambda: opened(sharded.calls, 0, CUT, three_values),
        "no gradient": lambda: opened(no_gradient),
        "several factors": lambda: opened(several_factors),
    }


def all_misuses(rank):
    """By name: the error, whether the model is at rest, norm and state after the next step."""
    found = {}
    for name in misuses(Sharded(rank)):
        sharded = Sharded(rank)
        error = attempt(misuses(sharded)[name])
        at_rest = sharded.is_at_rest()
        found[name] = error, at_rest, sharded.step(0, CUT).grad_norm, sharded.state()
    return found


def of_construction(rank):
    sharded = Sharded(rank)
    model = plain_model()
    too_early, _ = optimizers(model)
    fully_shard(model)
    mesh = device_mesh((1, 2), "data", "tensor")
    tensor_parallel = parallelize_module(plain_model(), mesh["tensor"], {"layers.0": ColwiseParallel()})
    fully_shard(tensor_parallel, mesh=mesh["data"])
    two = plain_model()
    fully_shard(two.layers[0], mesh=device_mesh((2, 1), "replicate", "shard"))
    fully_shard(two)
    return {
        "optimizer": attempt(TrainStep, model, too_early),
        "tensor parallel": attempt(TrainStep, tensor_parallel, optimizers(tensor_parallel)[0]),
        "two meshes": attempt(TrainStep, two, optimizers(two)[0]),
        "norm": attempt(TrainStep, sharded.model, sharded.optimizer, max_grad_norm=0),
        "added up": attempt(TrainStep, sharded.model, sharded.optimizer, calls_add_up=True),
        "not sharded": attempt(TrainStep, plain_model(), sharded.optimizer),
        "open": attempt(lambda: [sharded.train_step.begin() for _ in range(2)]),
    }


def found_by(rank, world_size):
    yield "recovered", partial(all_recovered, rank)
    yield "without reset", partial(without_reset_iter_state, rank)
    yield "misuses", partial(all_misuses, rank)
    yield "construction", partial(of_construction, rank)


@pytest.fixture(scope="module")
def ranks():
    return run_cells(found_by, 2, timeout=400)


def assert_fresh(norm, state, steps, earlier=0):
    expected_norm, expected = reference(range(steps), CUT)[-1]
    assert norm == pytest.approx(expected_norm, rel=1e-12)
    assert largest_difference(state, expected) < 1e-12


@pytest.mark.parametrize(
    ("place", "earlier"), [*((place, 1) for place in PLACES), *((place, 0) for place in FIRST)]
)
@pytest.mark.parametrize("torch_is", ["recovered", "without reset"])
def test_an_exception_leaves_a_fresh_start(ranks, torch_is, place, earlier):
    for found in ranks:
        error, at_rest, norm, state = found[torch_is][place, earlier]
        assert error == (None if place == "abort" else "Interrupted")
        assert at_rest
        assert_fresh(norm, state, earlier + 1)


MISUSES = {
    "step of one's own": "step() of the optimizer while a TrainStep of its model is open: the step owns",
    "zero_grad of one's own": "zero_grad() of the optimizer while a TrainStep of its model is open",
    "too few passes": "the call made 1 backward passes; expected 2, as many as the rank with the most",
    "too many passes": "the call made 3 backward passes; expected 2",
    "no pass": "the call made 0 backward passes; expected 2",
    "a rank without data": "a rank has no microbatches in this call, unlike others, and has never had any",
    "no microbatch": "the sum of microbatches over all ranks is 0; expected a finite number above 0",
    "no call": "the sum of microbatches over all ranks is 0; expected a finite number above 0",
    "three values": "the loss function returned 3 values; with FSDP2 expected (loss, metrics)",
    "no gradient": "no parameter of the optimizer has a gradient",
    "several factors": "gradients are divided by several numbers: 2, 2.5; expected one for all modules",
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_told_on_all_ranks(ranks, name):
    for found in ranks:
        outcome, at_rest, norm, state = found["misuses"][name]
        assert_misuse(outcome, MISUSES[name])
        assert at_rest
        assert_fresh(norm, state, 1)


CONSTRUCTION = {
    "optimizer": "the optimizer has parameters that fully_shard did not shard",
    "tensor parallel": "with FSDP2 all ranks have to be data parallel",
    "two meshes": "with FSDP2 all ranks have to be data parallel",
    "norm": "max_grad_norm is 0; expected a number above 0, or None",
    "added up": "calls_add_up is for Megatron",
    "not sharded": "model is Tiny; expected Megatron's DistributedDataParallel, a list of them, or a module with",
    "open": "a step of this model is open already",
}


@pytest.mark.parametrize("name", CONSTRUCTION)
def test_what_a_step_is_made_of(ranks, name):
    for found in ranks:
        assert_misuse(found["construction"][name], CONSTRUCTION[name])
