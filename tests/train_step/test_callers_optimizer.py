"""TrainStep for frameworks with an optimizer step of their own, at 2 ranks: a gradient that is reduced and left to
them, calls whose losses are normalized beforehand, and steps of adapters that take turns in one model."""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch
from rigs.imported import run_with_megatron
from rigs.megatron.options import BOTH, GRADS, assert_same_parameters, attempt
from rigs.train_step.models import MEAN, MOE, in_pieces, sum_forward_step

from megapatch.testing import init_parallel, tiny_gpt
from megapatch.testing._data import forward_step
from megapatch.train_step import TrainStep, open_step

CUT = (1, 3)


def of_whole(cut):
    """A loss that is divided by the microbatches of the whole step; Megatron's schedule divides by the call's."""
    sizes = iter([size for size in cut for _ in range(size)])

    def function(data, model):
        output, usual = forward_step(data, model, **MEAN)

        def loss_function(output):
            loss, metrics = usual(output)
            return loss * next(sizes) / sum(cut), metrics

        return output, loss_function

    return function


def added_up(options, **more):
    """The gradients, and after a step of the optimizer by the caller the parameters; Megatron's of one call."""
    model, reference = (tiny_gpt(**options) for _ in range(2))
    step = TrainStep(model.chunks, model.optimizer, calls_add_up=True, **more)
    for index in range(2):
        step.begin()
        in_pieces(step, model, index, CUT, MEAN, function=of_whole(CUT))
        normalizer = step.reduce()
        assert not step.is_open
        gradients = model.gradients()
        assert model.optimizer.step()[0]
        reference.train_step(index, num_microbatches=sum(CUT), **MEAN)
        assert_close(gradients, reference.gradients())
        for one in (model, reference):
            one.gather_parameters()
        assert_same_parameters(model.parameters(), reference.parameters())
    return normalizer


def by_expected(options):
    """Losses that are divided by what the step about comes to, with Megatron's mean over microbatches undone, as
    NeMo-RL does; against Megatron's mean over tokens."""
    model, reference = (tiny_gpt(per_token_loss=True, **options) for _ in range(2))
    expected_tokens = 100.0
    sizes = iter([size for size in CUT for _ in range(size)])

    def function(data, model):
        output, usual = sum_forward_step(data, model)

        def loss_function(output):
            total, metrics = usual(output)
            return total * next(sizes) / expected_tokens, metrics

        return output, loss_function

    with TrainStep(model.chunks, model.optimizer, calls_add_up=True, expected_count=expected_tokens) as step:
        in_pieces(step, model, 0, CUT, function=function)
        normalizer = step.finish().normalizer
    reference.train_step(0, num_microbatches=sum(CUT), masked=True)
    assert_close(model.gradients(), reference.gradients())
    assert normalizer != expected_tokens


def assert_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (ours[name] - value).abs().max() <= 1e-5 * value.abs().max()


def without_data():
    """Rank 1 has none: the gradient is half of what it is where both have rank 0's."""
    model, alone = tiny_gpt(**GRADS), tiny_gpt(**GRADS)
    step = TrainStep(model.chunks, model.optimizer, calls_add_up=True)
    step.begin()
    batches = model.microbatches(0, 2)
    if torch.distributed.get_rank() == 0:
        in_pieces(step, model, 0, (2,), MEAN)
    step.reduce()
    for batch in batches:
        torch.distributed.broadcast(batch, 0)
    alone.train_step(microbatches=batches, **MEAN)
    assert_close({name: gradient * 2 for name, gradient in model.gradients().items()}, alone.gradients())


def adapters(last=False):
    """Two steps of one model, whose gradients are swapped between their calls; against each alone."""
    model, reference = tiny_gpt(**GRADS), tiny_gpt(**GRADS)
    if last:  # not the first step, from which Megatron learns
        model.zero_grad()
        model.forward_backward(0, **MEAN)
    one, other = (TrainStep(model.chunks, model.optimizer) for _ in range(2))
    buffers = [buffer.grad_data for chunk in model.chunks for buffer in chunk.buffers]
    one.begin()
    in_pieces(one, model, 0, (1,), MEAN)
    kept = [buffer.clone() for buffer in buffers]
    one.set_aside()
    errors = [attempt(one.set_aside), attempt(one.begin), attempt(one.finish)]
    assert open_step(model.chunks) is None
    assert one.is_open
    other.begin()
    errors.append(attempt(one.take_up))
    in_pieces(other, model, 1, CUT, MEAN, last=last)
    other.reduce()
    reference.train_step(1, num_microbatches=4, **MEAN)
    assert_close(model.gradients(), reference.gradients())
    for buffer, value in zip(buffers, kept, strict=True):
        buffer.copy_(value)
    one.take_up()
    errors.append(attempt(one.take_up))
    assert open_step(model.chunks) is one
    in_pieces(one, model, 2, (2,), MEAN, last=last)
    if last:
        errors.append(attempt(one.set_aside))
    one.reduce()
    reference = tiny_gpt(**GRADS)
    batches = [*reference.microbatches(0, 1), *reference.microbatches(2, 2)]
    reference.train_step(microbatches=batches, **MEAN)
    assert_close(model.gradients(), reference.gradients())
    return errors


def aborted_aside():
    """Its gradients are not in the buffers: those that are there are another's."""
    model = tiny_gpt(**GRADS)
    one, other = (TrainStep(model.chunks, model.optimizer) for _ in range(2))
    one.begin()
    one.set_aside()
    other.begin()
    in_pieces(other, model, 0, CUT, MEAN)
    one.abort()
    assert not one.is_open
    assert other.is_open
    assert any(gradient.any() for gradient in model.gradients().values())
    other.finish()


def partly_seen_between():
    """In the first step of a model another comes in between, which does not use a layer."""
    model, reference = tiny_gpt(**GRADS), tiny_gpt(**GRADS)
    one, other = (TrainStep(model.chunks, model.optimizer) for _ in range(2))
    one.begin()
    one.set_aside()
    other.begin()
    layer = model.chunks[0].module.decoder.layers[0]
    with mock.patch.object(layer, "forward", lambda hidden_states, **_: (hidden_states, None)):
        in_pieces(other, model, 0, CUT, MEAN, last=True)
    other.reduce()
    for buffer in model.chunks[0].buffers:
        buffer.grad_data.zero_()
    one.take_up()
    in_pieces(one, model, 1, CUT, MEAN)
    one.reduce()
    reference.train_step(1, num_microbatches=sum(CUT), **MEAN)
    assert_close(model.gradients(), reference.gradients())


def dropped():
    """A step whose caller has forgotten it."""
    model = tiny_gpt(**GRADS)
    TrainStep(model.chunks, model.optimizer).begin()
    gc.collect()
    assert open_step(model.chunks) is None
    with TrainStep(model.chunks, model.optimizer) as step:
        in_pieces(step, model, 0, CUT, MEAN)
        step.finish()


def found_by(rank, world_size):
    init_parallel()
    found = [added_up(options) for options in ({}, GRADS, BOTH)]
    found.append(added_up({**MOE, **GRADS}, expected_microbatches=sum(CUT)))
    without_data()
    aborted_aside()
    partly_seen_between()
    dropped()
    for options in ({}, BOTH):
        by_expected(options)
    return {"normalizers": found, "adapters": adapters(), "last": adapters(last=True)}


@pytest.fixture(scope="module")
def ranks():
    return run_with_megatron(found_by, 2)


def test_what_is_asserted_on_the_ranks(ranks):
    for found in ranks:
        assert found["normalizers"] == [1.0] * 4


MISUSES = (
    "set_aside(): this step was set aside; call take_up() first",
    "begin(): this step was set aside; call take_up() or abort() first",
    "finish(): this step was set aside; call take_up() first",
    "a step of this model is open already; call its finish() or abort() before take_up()",
    "take_up() needs a step that was set aside",
)


def test_misuse_of_a_step_that_was_set_aside(ranks):
    for found in ranks:
        assert found["adapters"] == [("MisuseError", text) for text in MISUSES]
        reduced = "set_aside(): the last call of this step was made; call finish() or abort()"
        assert found["last"] == [*found["adapters"], ("MisuseError", reduced)]
