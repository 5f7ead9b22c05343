"""Refusals of TrainStep, at 2 ranks: models and arguments that do not fit, and a second open step."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from rigs.imported import run_with_megatron
from rigs.megatron.options import GRADS, Interrupted, assert_misuse, attempt
from rigs.train_step.layouts import NOT_KNOWN_HERE, is_known_here, model_of
from rigs.train_step.models import MEAN, in_pieces

from megapatch.errors import MisuseError
from megapatch.testing import init_parallel, tiny_gpt
from megapatch.testing._data import forward_step
from megapatch.train_step import TrainStep, refuse_while_open

pytestmark = pytest.mark.thorough

CUT = (2, 1)


class Scheduler:
    """Raises where it is told to."""

    def __init__(self, fails=False):
        self.fails, self.increments = fails, []

    def step(self, increment):
        if self.fails:
            raise Interrupted
        self.increments.append(increment)


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
    found["scheduler without increment"] = attempt(stepped, TrainStep(model.chunks, model.optimizer, Scheduler()))
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
    return found


def stepped(step, cut=CUT, increment=None):
    with step:
        in_pieces(step, MODEL[0], 0, cut, MEAN)
        return step.finish(increment)


MODEL = []


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


def found_by(rank, world_size):
    init_parallel()
    MODEL.append(tiny_gpt(**GRADS))
    return {"others": other_misuses(), "no tokens": no_tokens(), "experts": experts(), "indexer": indexer_loss()}


@pytest.fixture(scope="module")
def ranks():
    return run_with_megatron(found_by, 2)


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
