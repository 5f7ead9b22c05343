"""A step's methods in any order, with exceptions anywhere, at 2 ranks: after each the model's config is what it
was, an abort leaves no gradient, and each finished step is Megatron's of one call."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from rigs.imported import run_with_megatron
from rigs.megatron.options import BOTH, GRADS, Interrupted, assert_same_parameters, raising_half_way
from rigs.train_step.models import MEAN

from megapatch import MegapatchError
from megapatch.testing import init_parallel, tiny_gpt
from megapatch.testing._data import forward_step
from megapatch.train_step import TrainStep

pytestmark = pytest.mark.thorough
# Both ranks have to do the same, so that nothing is left to chance.
SETTINGS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=10,
    stateful_step_count=25,
    suppress_health_check=list(HealthCheck),
)


def machine_for(options):
    model, reference = (tiny_gpt(layers=4, **options) for _ in range(2))
    config = dict(vars(model.config))
    at = iter(range(1_000_000))  # each step has other data

    class AnyOrder(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.step = TrainStep(model.chunks, model.optimizer)
            self.batches = []
            self.aborted = False

        @precondition(lambda self: not self.step.is_open)
        @rule()
        def begin(self):
            self.step.begin()
            self.batches, self.aborted = [], False

        @precondition(lambda self: self.step.is_open)
        @rule(size=st.integers(1, 3))
        def call(self, size):
            batches = model.microbatches(next(at), size)
            self.forward_backward(batches)
            self.batches += batches

        @precondition(lambda self: self.step.is_open)
        @rule(place=st.sampled_from(["forward", "loss", "half of the backward"]), microbatch=st.integers(0, 1))
        def call_that_raises(self, place, microbatch):
            calls = iter(range(10))

            def raising(data, model):
                index = next(calls)
                if (place, index) == ("forward", microbatch):
                    raise Interrupted
                output, usual = forward_step(data, model, **MEAN)

                def loss_function(output):
                    if (place, index) == ("loss", microbatch):
                        raise Interrupted
                    return usual(output)

                return output, loss_function

            half_way = contextlib.nullcontext()
            if place == "half of the backward":
                half_way = raising_half_way(model, microbatch)
            with pytest.raises(Interrupted), half_way:
                self.forward_backward(model.microbatches(next(at), 2), raising)
            self.aborted = True

        @precondition(lambda self: self.step.is_open and self.batches)
        @rule()
        def finish(self):
            result = self.step.finish()
            expected = reference.train_step(microbatches=self.batches, **MEAN)
            assert result.num_microbatches == len(self.batches)
            assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
            for one in (model, reference):
                one.gather_parameters()
            assert_same_parameters(model.parameters(), reference.parameters())

        @rule()
        def abort(self):
            self.aborted = self.aborted or self.step.is_open
            self.step.abort()

        @precondition(lambda self: not self.step.is_open)
        @rule()
        def step_of_megatrons_own(self):
            index = next(at)
            norms = [one.train_step(index, **MEAN).grad_norm for one in (model, reference)]
            assert norms[0] == pytest.approx(norms[1], rel=1e-4)
            self.aborted = False

        @rule()
        def out_of_order(self):
            wrong = self.step.begin if self.step.is_open else self.step.finish
            was_open = self.step.is_open
            with pytest.raises(MegapatchError):
                wrong()
            assert self.step.is_open == was_open

        @invariant()
        def config_is_what_it_was(self):
            assert vars(model.config) == config

        @invariant()
        def nothing_is_left_of_an_aborted_step(self):
            if self.aborted:
                assert not self.step.is_open
                assert not any(gradient.any() for gradient in model.gradients().values())

        def forward_backward(self, batches, function=None):
            self.step.forward_backward(
                forward_step_func=function or partial(forward_step, **MEAN),
                data_iterator=iter(batches),
                num_microbatches=len(batches),
                seq_length=model.seq,
                micro_batch_size=2,
            )

        def teardown(self):
            self.step.abort()

    return AnyOrder


def in_any_order(rank, world_size, options):
    init_parallel()
    run_state_machine_as_test(machine_for(options), settings=SETTINGS)


@pytest.mark.parametrize(
    "options", [pytest.param(GRADS, id="grads", marks=pytest.mark.nightly), pytest.param(BOTH, id="both")]
)
def test_any_order(options):
    run_with_megatron(in_any_order, 2, options)
