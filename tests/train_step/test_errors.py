"""Failures in a step, at 2 ranks: each has a clear message, or is the caller's own exception, and leaves
the model's config, its gradients and the rerun state machine as before; the next step is a fresh one.

Refused are models and arguments that do not fit, and a second open step.
"""

from __future__ import annotations

import contextlib
import math
from functools import partial
from unittest import mock

import pytest
import torch
from rigs.cells import cells_of
from rigs.megatron.options import (
    BOTH,
    GRADS,
    Interrupted,
    assert_misuse,
    assert_same_parameters,
    attempt,
    new_machine,
    rerun_data,
)
from rigs.step_state import interrupted
from rigs.train_step.layouts import NOT_KNOWN_HERE, is_known_here, model_of
from rigs.train_step.models import MEAN, in_pieces

from megapatch.errors import MisuseError
from megapatch.testing import init_parallel, tiny_gpt
from megapatch.testing._data import forward_step
from megapatch.train_step import TrainStep, refuse_while_open

pytestmark = pytest.mark.thorough

CUT = (2, 1)
OPTIONS = {"grads": GRADS, "both": BOTH}


def misuses(model, step):
    """By name: a function that ends in an error, from a closed step."""

    def opened(call, *args, **kwargs):
        step.begin()
        call(*args, **kwargs)

    def pieces(cut=CUT, **more):
        in_pieces(step, model, 0, cut, MEAN, **more)

    def whole(num_microbatches=2, **options):
        with step.accumulate(num_microbatches):
            model.forward_backward(0, **options)

    def twice_in_one():
        with step.accumulate(2):
            model.forward_backward(0)
            model.forward_backward(0)

    def within(call):
        with step.accumulate(2):
            call()

    def without_finish():
        with step:
            pieces()

    def in_the_body():
        with step:
            pieces()
            raise Interrupted

    def freed():
        pieces()
        for chunk in model.chunks:
            for buffer in chunk.buffers:
                buffer.grad_data.untyped_storage().resize_(0)
        step.finish()

    def fails(place, microbatch=1, last=False):
        context, function = interrupted(model, place, microbatch)
        with context:
            pieces(function=function, last=last)
            step.finish()

    def call_after_the_last():
        pieces(last=True)
        pieces()

    return {
        "call without begin": lambda: pieces(),
        "finish without begin": lambda: step.finish(),
        "finish without a call": lambda: opened(step.finish),
        "no microbatch": lambda: opened(whole, 0),
        "other number of microbatches": lambda: opened(whole, 3),
        "forward only": lambda: opened(whole, forward_only=True),
        "two schedules": lambda: opened(twice_in_one),
        "call within a call": lambda: opened(within, pieces),
        "finish within a call": lambda: opened(within, lambda: step.finish()),
        "count": lambda: opened(lambda: step.accumulate(1, count=1).__enter__()),
        "without finish": without_finish,
        "in the body": in_the_body,
        "optimizer": lambda: opened(fails, "in the optimizer"),
        "finalize": lambda: opened(fails, "before finalize"),
        "forward 0": lambda: opened(fails, "forward", 0),
        "forward 2": lambda: opened(fails, "forward", 2),
        "loss 1": lambda: opened(fails, "loss", 1),
        "half of the backward": lambda: opened(fails, "backward", 2),
        "half of the last backward": lambda: opened(fails, "backward", 2, last=True),
        "half of the last backward of the first step": lambda: opened(fails, "backward", 2, last=True),
        "finalize in the last call": lambda: opened(fails, "before finalize", last=True),
        "call after the last": lambda: opened(call_after_the_last),
        "freed": lambda: opened(freed),
    }


OF_BOTH = (
    "optimizer",
    "finalize",
    "forward 0",
    "loss 1",
    "half of the backward",
    "half of the last backward",
    "half of the last backward of the first step",
    "freed",
)


def other_misuses():
    found = {}
    model = tiny_gpt(**GRADS)
    step = TrainStep(model.chunks, model.optimizer)
    found["nothing to save"] = attempt(refuse_while_open, model.chunks, "saving a checkpoint")
    step.begin()
    found["begin twice"] = attempt(step.begin), step.is_open
    another = TrainStep(model.chunks[0], model.optimizer)
    found["another step"] = attempt(another.begin), step.is_open
    found["to save"] = attempt(refuse_while_open, model.chunks, "saving a checkpoint")
    in_pieces(step, model, 0, (1,), MEAN)
    step.finish()
    found["finished twice"] = attempt(step.finish)
    scheduled = TrainStep(model.chunks, model.optimizer, mock.Mock())
    with contextlib.suppress(MisuseError), scheduled:
        in_pieces(scheduled, model, 0, CUT, MEAN)
        found["scheduler without increment"] = attempt(scheduled.finish)
    found["model"] = attempt(TrainStep, torch.nn.Linear(1, 1), model.optimizer)
    found["no model"] = attempt(TrainStep, [], model.optimizer)
    found["microbatches"] = attempt(TrainStep, model.chunks, model.optimizer, expected_microbatches=0)
    found["expected_count"] = attempt(TrainStep, model.chunks, model.optimizer, expected_count=0)
    counting = TrainStep(model.chunks, model.optimizer, expected_count=10)
    with contextlib.suppress(Exception), counting:
        found["no count"] = attempt(counting.accumulate(1).__enter__)
    counting.begin()
    with counting.accumulate(1, count=0):
        model.forward_backward(0, num_microbatches=1)
    found["count of zero"] = attempt(counting.finish)
    found["infinite expected_count"] = attempt(TrainStep, model.chunks, model.optimizer, expected_count=math.inf)
    counting.begin()
    with counting.accumulate(1, count=math.inf):
        model.forward_backward(0, num_microbatches=1)
    found["infinite count"] = attempt(counting.finish)
    config = dict(vars(model.config))
    step.begin()
    body = step.accumulate(1)  # a variable, as its end would close it
    body.__enter__()
    step.abort()
    found["aborted in its body"] = vars(model.config) == config
    return found


def no_tokens():
    """All tokens masked, on all ranks."""
    model = tiny_gpt(per_token_loss=True)

    def nothing(data, model):
        output, usual = forward_step(data, model)
        return output, lambda output: (usual(output)[0] * 0, torch.tensor(0, dtype=torch.int), {})

    step = TrainStep(model.chunks, model.optimizer)
    step.begin()
    in_pieces(step, model, 0, CUT, {}, function=nothing)
    return attempt(step.finish), step.is_open


def experts():
    model = tiny_gpt(experts=2)
    return attempt(TrainStep, model.chunks, model.optimizer, expected_count=10)


def indexer_loss():
    """A loss of which TrainStep knows nothing until the schedule asks for its scale."""
    options = {"indexer_loss": True}
    if not is_known_here(options):
        return None
    model = model_of({}, options)
    step = TrainStep(model.chunks, model.optimizer, expected_count=10)
    with contextlib.suppress(MisuseError), step:
        return attempt(in_pieces, step, model, 0, (1,))


def state_of(model):
    gradients = [float(gradient.abs().max()) for gradient in model.gradients().values()]
    groups = [group for chunk in model.chunks for group in chunk.bucket_groups]
    handles = [group.grad_reduce_handle for group in groups]
    return dict(vars(model.config)), max(gradients), set(handles)


def found_by(rank, world_size):
    init_parallel()
    yield "others", other_misuses
    yield "no tokens", no_tokens
    yield "experts", experts
    yield "indexer", indexer_loss
    for options, names in {"grads": misuses(None, None), "both": OF_BOTH}.items():
        for name in names:
            yield (options, name), partial(after_misuse, OPTIONS[options], name)


def after_misuse(options, name):
    """The error, what became of the model, and whether the next step is Megatron's own."""
    machine = new_machine("VALIDATE_RESULTS")
    data = rerun_data(0)
    machine.should_run_forward_backward(data)
    model, reference = (tiny_gpt(layers=4, **options) for _ in range(2))
    for one in (model, reference):
        if "first step" not in name:  # from which Megatron learns
            one.train_step(0, **MEAN)
    step = TrainStep(model.chunks, model.optimizer)
    config = dict(vars(model.config))
    error = attempt(misuses(model, step)[name])
    if name == "freed":
        return error
    after, largest, handles = state_of(model)
    step.abort()  # for the second time
    state = machine.state.name
    with step:
        in_pieces(step, model, 1, CUT, MEAN)
        norm = step.finish().grad_norm
    expected = reference.train_step(1, num_microbatches=3, **MEAN).grad_norm
    for one in (model, reference):
        one.gather_parameters()
    assert_same_parameters(model.parameters(), reference.parameters())
    return error, after == config, largest, handles == {None}, state, norm == pytest.approx(expected)


ranks = cells_of(found_by, 2)


ERRORS = {
    "call without begin": "accumulate() needs an open step: begin() was not called",
    "finish without begin": "finish() needs an open step: begin() was not called",
    "finish without a call": "a step needs at least one forward-backward call on this rank",
    "no microbatch": "num_microbatches is 0; expected 1 or more",
    "other number of microbatches": "num_microbatches is 3; the schedule was called with 2",
    "forward only": "exactly one call of a schedule, with forward_only=False; it got 0",
    "two schedules": "exactly one call of a schedule, with forward_only=False; it got 2",
    "call within a call": "accumulate() within accumulate(): its body is for one call",
    "finish within a call": "finish() within accumulate(): its body is for one call",
    "count": "count= goes together with TrainStep(..., expected_count=...)",
    "without finish": "the `with` ended without finish(): the gradients of its calls are dropped",
    "in the body": None,
    "optimizer": None,
    "finalize": None,
    "forward 0": None,
    "forward 2": None,
    "loss 1": None,
    "half of the backward": None,
    "half of the last backward": None,
    "half of the last backward of the first step": None,
    "finalize in the last call": None,
    "call after the last": "the last call of this step was made: finish() it",
}


@pytest.mark.parametrize(
    ("options", "name"),
    [*(("grads", name) for name in ERRORS), *(("both", name) for name in ERRORS if name in OF_BOTH)],
)
def test_an_error_leaves_a_fresh_start(ranks, options, name):
    for found in ranks:
        (error, text), *state = found[options, name]
        assert error == ("Interrupted" if ERRORS[name] is None else "MisuseError")
        assert (ERRORS[name] or "") in text
        config_same, largest, no_handles, machine, next_is_right = state
        began = name not in ("call without begin", "finish without begin")
        assert config_same
        assert (largest == 0.0) == began
        assert no_handles
        assert machine == ("NOT_RUNNING_YET" if began else "INITIAL_RUN")
        assert next_is_right


@pytest.mark.parametrize("options", ["grads", "both"])
def test_gradient_buffers_that_were_freed_are_seen(ranks, options):
    for found in ranks:
        assert_misuse(found[options, "freed"], "gradient buffers were freed while the step was open")


# ------------------------------------------------------------------------------------------ refusals
OTHERS = {
    "to save": "saving a checkpoint while a TrainStep of this model is open: call its finish() or abort() first",
    "finished twice": "finish() needs an open step: it was finished",
    "scheduler without increment": "finish() needs increment=",
    "model": "model is Linear; expected Megatron's DistributedDataParallel, or a list of them",
    "no model": "model is an empty list; expected",
    "expected_count": "expected_count is 0; expected a finite number above 0",
    "microbatches": "expected_microbatches is 0; expected a finite number above 0",
    "no count": "this step has an expected_count: each call needs its count=",
    "infinite expected_count": "expected_count is inf; expected a finite number above 0",
    "infinite count": "the sum of counts over all ranks is inf; expected a finite number above 0",
    "count of zero": "the sum of counts over all ranks is 0; expected a finite number above 0",
}


@pytest.mark.parametrize("name", OTHERS)
def test_misuse_is_told(ranks, name):
    for found in ranks:
        assert_misuse(found["others"][name], OTHERS[name])


def test_a_model_has_one_open_step(ranks):
    for found in ranks:
        for name in ("begin twice", "another step"):
            outcome, still_open = found["others"][name]
            assert_misuse(outcome, "a step of this model is open already")
            assert still_open
        assert found["others"]["nothing to save"] == (None, None)


def test_aborted_in_its_body_it_leaves_no_hook(ranks):
    assert [found["others"]["aborted in its body"] for found in ranks] == [True, True]


def test_no_tokens_on_any_rank(ranks):
    for found in ranks:
        outcome, still_open = found["no tokens"]
        assert_misuse(outcome, "the sum of tokens over all ranks is 0; expected a finite number above 0")
        assert not still_open


def test_a_count_with_experts_asks_for_what_their_losses_weigh(ranks):
    for found in ranks:
        assert_misuse(found["experts"], "needs expected_microbatches")


def test_so_does_one_with_a_loss_that_only_the_schedule_knows(ranks):
    for found in ranks:
        if found["indexer"] is None:
            pytest.skip(NOT_KNOWN_HERE)
        text = "a loss of the model's own, which its schedule scales, needs expected_microbatches"
        assert_misuse(found["indexer"], text)
