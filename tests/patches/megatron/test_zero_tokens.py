"""megatron.zero-tokens: steps of the real schedules with a microbatch in which no token counts."""

import functools
import math

import pytest
import torch
from rigs.cells import cells_of
from rigs.megatron.options import UNPATCHED
from rigs.megatron.save import minor

from megapatch import TrainStep
from megapatch.testing import init_parallel, tiny_gpt
from megapatch.testing._data import forward_step

DTYPES = ("fp32", "bf16", "fp16")
EMPTY = torch.zeros(2, 9, dtype=torch.int64)  # `masked` counts no label that is a multiple of 3


def gradients(model, microbatches, weight=1.0):
    model.zero_grad()
    model.forward_backward(microbatches=microbatches, masked=True)
    return {name: gradient * weight for name, gradient in model.gradients().items()}


def furthest(found, expected):
    return max((found[name] - gradient).abs().max().item() for name, gradient in expected.items())


def half_a_step(dtype, **options):
    """How far the gradient of a full microbatch and an empty one is from half of the full one's own."""
    model = tiny_gpt(dtype=dtype, **options)
    (full,) = model.microbatches(0, 1)
    weight = 1.0 if options.get("per_token_loss") else 0.5
    return max(
        furthest(gradients(model, pair), gradients(model, [full], weight))
        for pair in ([full, EMPTY], [EMPTY, full])
    )


def nothing_but_empty(dtype):
    """The largest gradient of a step without tokens, and whether the optimizer stepped."""
    model = tiny_gpt(dtype=dtype)
    largest = max(gradient.abs().max().item() for gradient in gradients(model, [EMPTY, EMPTY]).values())
    return largest, model.optimizer.step()[0]


def by_train_step():
    """How far a split step, one of whose calls has no tokens, is from a step of one call."""
    model = tiny_gpt()
    (full,) = model.microbatches(0, 1)
    expected = gradients(model, [full], 0.5)
    train_step = TrainStep(model=model.chunks, optimizer=model.optimizer)
    train_step.begin()
    for microbatch in (full, EMPTY):
        train_step.forward_backward(
            forward_step_func=functools.partial(forward_step, masked=True),
            data_iterator=iter([microbatch]),
            num_microbatches=1,
            seq_length=model.seq,
            micro_batch_size=2,
        )
    train_step.reduce()
    difference = furthest(model.gradients(), expected)
    train_step.abort()
    return difference


def job(rank, world_size):
    init_parallel()
    for dtype in DTYPES:
        yield dtype, functools.partial(half_a_step, dtype)
        yield (dtype, "only"), functools.partial(nothing_but_empty, dtype)
    yield "per token", functools.partial(half_a_step, "fp32", per_token_loss=True)
    yield "train step", by_train_step


unpatched = cells_of(job, 1, env=UNPATCHED)
patched = cells_of(job, 1)


@pytest.mark.skipif(minor() > 14, reason="Megatron's own from 0.15 on")
@pytest.mark.parametrize("cell", [*DTYPES, "train step"])
@pytest.mark.quick
def test_without_the_patch_one_empty_microbatch_makes_the_gradient_nan(unpatched, cell):
    assert math.isnan(unpatched[cell])


@pytest.mark.parametrize("cell", [*DTYPES, "per token", "train step"])
@pytest.mark.quick
def test_a_step_with_an_empty_microbatch_has_the_gradient_of_the_others(patched, cell):
    assert patched[cell] == 0.0


def test_per_token_loss_is_megatrons_own(unpatched):
    assert unpatched["per token"] == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_without_tokens_steps_on_nothing(patched, dtype):
    assert patched[dtype, "only"] == (0.0, True)
