"""A step's result, when its scheduler moves, fp16 with a dynamic loss scale, ranks without data; at 2 ranks."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from rigs.cells import cells_of
from rigs.megatron.options import GRADS, assert_same_parameters, linear_schedule
from rigs.train_step.models import MEAN, MOE, MTP, in_pieces, sum_forward_step

from megapatch.testing import init_parallel, tiny_gpt
from megapatch.testing._data import forward_step
from megapatch.train_step import StepResult, TrainStep

pytestmark = pytest.mark.thorough

TOKENS = {"masked": True}
sum_of_all = partial(sum_forward_step, masked=False)


def scheduler_for(model):
    """Megatron's own: the learning rate falls from 0.5 by a hundredth of it a sample."""
    return linear_schedule(model.optimizer, steps=100, init_lr=0.5, max_lr=0.5, end_wd=1.0)


def told():
    """Three steps of 4 microbatches in pieces, each of 10 samples to the scheduler."""
    model = tiny_gpt(optim={"log_num_zeros_in_grad": True, "min_lr": 0.0}, per_token_loss=True)
    model.optimizer.param_groups[0]["max_lr"] = 0.25  # the result has the largest rate
    step = TrainStep(model.chunks[0], model.optimizer, scheduler_for(model))
    found = []
    for index in range(3):
        with step:
            in_pieces(step, model, index, (1, 3), TOKENS)
            result = step.finish(increment=10)
        tokens = sum(int((batch[:, 1:] % 3 != 0).sum()) for batch in model.microbatches(index, 4))
        found.append((result, tokens))
    return found


def overflowing(on_skip):
    """fp16 whose scale is too large at first: by step, the result, the scale, the learning rate then."""
    model = tiny_gpt(dtype="fp16", loss_scale=2.0**40, optim={"hysteresis": 1, "min_lr": 0.0}, **GRADS)
    step = TrainStep(model.chunks, model.optimizer, scheduler_for(model), step_scheduler_on_skip=on_skip)
    before = model.parameters()
    with step:
        in_pieces(step, model, 0, (1, 1), MEAN)
        result = step.finish(increment=10)
    assert_same_parameters(model.parameters(), before)
    return result, float(model.optimizer.get_loss_scale()), model.optimizer.param_groups[0]["lr"]


def make_call(step, model, batches, size=2, **more):
    """Make a call with these microbatches, of `size` samples each, whose tokens all count."""
    tokens = len(batches) * size * model.seq
    usual = {"forward_step_func": sum_of_all, "data_iterator": iter(batches), "count": tokens}
    sizes = {"num_microbatches": len(batches), "seq_length": model.seq, "micro_batch_size": size}
    step.forward_backward(**{**usual, **sizes, **more})


def many_tokens():
    """fp16 with a dynamic scale and 1e5 tokens in a step by a count, in 1 and in 5 pieces; the same in fp32."""
    norms = []
    microbatches, size = 10, 625  # of 8 tokens, on 2 ranks
    for dtype, cut in (("fp32", (10,)), ("fp16", (10,)), ("fp16", (1, 2, 2, 2, 3))):
        model = tiny_gpt(dtype=dtype, loss_scale=2.0**16)
        step = TrainStep(model.chunks, model.optimizer, expected_count=100_000)
        batches = iter(model.microbatches(0, microbatches, micro_batch_size=size))
        with step:
            for count in cut:
                make_call(step, model, [next(batches) for _ in range(count)], size)
            result = step.finish()
        assert result.succeeded
        assert result.normalizer == 100_000
        norms.append(result.grad_norm)
    expected, *halves = norms
    assert halves == pytest.approx([expected] * 2, rel=5e-3)  # of 11 bits, in sums of many: 2e-3 is seen
    assert halves[0] == pytest.approx(halves[1], rel=1e-3)


OTHER_LOSSES = {"experts": MOE, "multi-token prediction": MTP}
SCALES = {"experts": "moe_grad_scale_func", "multi-token prediction": "mtp_grad_scale_func"}


def counted_with(options):
    """All tokens count, as many in each microbatch: the mean over tokens is that over microbatches."""
    model, expected, without = tiny_gpt(**options), tiny_gpt(**options), tiny_gpt(**{**options, "config": {}})
    step = TrainStep(model.chunks, model.optimizer, expected_count=128, expected_microbatches=4)
    batches = iter(model.microbatches(0, 4))
    with step:
        for count in (1, 3):
            make_call(step, model, [next(batches) for _ in range(count)])
        result = step.finish()
    assert result.normalizer == 4 * 2 * model.seq * 2
    assert_norms(result.grad_norm, expected, without)
    assert_same_parameters(model.parameters(), expected.parameters())


def assert_norms(norm, expected, without, rel=1e-5):
    """Compare a norm with those of Megatron's step of one model, and of another one that lacks something."""
    same, other = (one.train_step(0, num_microbatches=4, **MEAN).grad_norm for one in (expected, without))
    assert norm == pytest.approx(same, rel=rel)
    assert norm != pytest.approx(other, rel=1e-3)


def with_scales_of_their_own(options, name):
    """A loss has a scale of its own. Return whether Megatron has such a thing (from 0.19 on)."""
    model, expected, without = (tiny_gpt(**options) for _ in range(3))
    if not hasattr(model.config, name):
        return False
    for one in (model, expected):
        setattr(one.config, name, lambda: 3.0)
    before = dict(vars(model.config))
    with TrainStep(model.chunks, model.optimizer) as step:
        in_pieces(step, model, 0, (1, 3), MEAN)
        norm = step.finish().grad_norm
    assert vars(model.config) == before
    assert_norms(norm, expected, without, rel=1e-6)
    return True


def after_a_scale_without_dimensions():
    """Someone has set the scale of the experts' loss so, as NeMo-RL's train() does. The last one is held."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler as Scaler

    model, expected = tiny_gpt(**MOE), tiny_gpt(**MOE)
    norm = expected.train_step(0, num_microbatches=4, **MEAN).grad_norm
    held, Scaler.main_loss_backward_scale = Scaler.main_loss_backward_scale, torch.tensor(1.0)
    with TrainStep(model.chunks, model.optimizer) as step:
        in_pieces(step, model, 0, (1, 3), MEAN)
        assert step.finish().grad_norm == pytest.approx(norm, rel=1e-6)
    Scaler.main_loss_backward_scale = held


def set_within_a_call():
    """A hook that the forward step sets stays; each call has set it aside."""

    def forward(data, chunk):
        model.config.grad_sync_func = own
        return forward_step(data, chunk, **MEAN)

    model, own = tiny_gpt(), print
    with TrainStep(model.chunks, model.optimizer) as step:
        in_pieces(step, model, 0, (1, 3), MEAN, forward)
        step.finish()
    assert model.config.grad_sync_func is own


def with_megatrons_finalize():
    """A config has no finalize function: it is Megatron's."""
    model, expected = tiny_gpt(**GRADS), tiny_gpt(**GRADS)
    model.config.finalize_model_grads_func = None
    with TrainStep(model.chunks, model.optimizer) as step:
        in_pieces(step, model, 0, (1, 3), MEAN)
        norm = step.finish().grad_norm
    assert norm == pytest.approx(expected.train_step(0, num_microbatches=4, **MEAN).grad_norm, rel=1e-6)
    assert_same_parameters(model.parameters(), expected.parameters())


def without_data(rank):
    """Rank 1 has no microbatch in a step by a count; the same by hand, with all data on rank 0."""
    for options in ({}, GRADS):
        model, alone = tiny_gpt(**options), tiny_gpt()
        for index in range(2):
            batches = model.microbatches(index, 2)
            step = TrainStep(model.chunks, model.optimizer, expected_count=30)
            step.begin()
            if rank == 0:
                count = sum(int((batch[:, 1:] % 3 != 0).sum()) for batch in batches)
                make_call(step, model, batches, forward_step_func=sum_forward_step, count=count)
            assert step.finish().grad_norm == pytest.approx(reference(rank, alone, batches), rel=1e-5)
            assert_same_parameters(model.parameters(), alone.parameters())


def reference(rank, model, batches):
    """A step of plain autograd on rank 0's data: the norm of the gradient."""
    model.zero_grad()
    chunk, tokens = model.chunks[0], torch.zeros(()).cuda()
    with chunk.no_sync():
        for batch in batches:
            output, function = forward_step(iter([batch]), chunk, masked=True)
            total, counted, _ = function(output)
            tokens += counted
            (total * (rank == 0)).backward()
    torch.distributed.broadcast(tokens, 0)
    # DistributedDataParallel takes the mean over ranks
    chunk.scale_gradients(torch.distributed.get_world_size() / float(tokens))
    chunk.finish_grad_sync()
    return float(model.optimizer.step()[1])


PROGRAMS = (
    with_megatrons_finalize,
    set_within_a_call,
    without_data,
    many_tokens,
    after_a_scale_without_dimensions,
)


def found_by(rank, world_size):
    init_parallel()
    yield "told", told
    for function in PROGRAMS:
        yield function.__name__, partial(function, rank) if function is without_data else function
    for name, options in OTHER_LOSSES.items():
        yield name, partial(counted_with, options)
    for name, function in SCALES.items():
        yield function, partial(with_scales_of_their_own, OTHER_LOSSES[name], function)
    for on_skip in (False, True):
        yield on_skip, partial(overflowing, on_skip)


ranks = cells_of(found_by, 2)


def test_a_result_tells_what_the_step_used(ranks):
    of_all = [sum(tokens) for tokens in zip(*[[n for _, n in found["told"]] for found in ranks], strict=True)]
    for found in ranks:
        for index, (result, _) in enumerate(found["told"]):
            assert isinstance(result, StepResult)
            assert result.succeeded
            assert math.isfinite(result.grad_norm)
            assert isinstance(result.num_zeros, int)
            assert (result.num_microbatches, result.num_calls) == (4, 2)
            assert result.normalizer == of_all[index]
            assert result.learning_rate == pytest.approx(0.5 * (1 - 10 * index / 100))
            assert result.weight_decay == pytest.approx(10 * index / 100)
    assert ranks[0]["told"][2][0] == ranks[1]["told"][2][0]


def test_after_an_overflow_the_scheduler_stays_unless_told_otherwise(ranks):
    for found in ranks:
        for on_skip, rate in ((False, 0.5), (True, 0.45)):
            result, scale, later = found[on_skip]
            assert not result.succeeded
            assert result.grad_norm is None
            assert result.learning_rate == 0.5
            assert scale == 2.0**39
            assert later == pytest.approx(rate)


@pytest.mark.parametrize("name", [*(program.__name__ for program in PROGRAMS), *OTHER_LOSSES])
def test_a_step_is_that_of_one_call(ranks, name):
    for found in ranks:
        found[name]


@pytest.mark.parametrize("name", SCALES.values())
def test_scales_of_their_own_hold_in_each_call(ranks, name):
    for found in ranks:
        if not found[name]:
            pytest.skip("Megatron has it from 0.19 on")
