"""megatron.layer-wise-gathers: steps in several calls, and passes that raise, with the layer-wise optimizer.

The reference is Adam on each rank, without overlap and in one call.
"""

import contextlib
from functools import partial

import pytest
import torch
from rigs.cells import cells_of
from rigs.megatron.options import ADAM, UNPATCHED, Interrupted
from rigs.megatron.save import minor
from rigs.train_step.layer_wise import GATHERS_AHEAD, layer_wise
from rigs.train_step.models import MEAN

from megapatch.testing import init_parallel, tiny_gpt
from megapatch.testing._data import forward_step
from megapatch.train_step import TrainStep

pytestmark = pytest.mark.skipif(not GATHERS_AHEAD, reason="parameters are gathered in the step itself")
STEPS = 2


def whole():
    return tiny_gpt(layers=4, **ADAM)


@contextlib.contextmanager
def hooks_off(model):
    for chunk in model.chunks:
        chunk.disable_forward_pre_hook()
    yield
    for chunk in model.chunks:
        chunk.enable_forward_pre_hook()


def nothing(model):
    pass


def evaluate(model):
    with torch.no_grad():
        model.forward_backward(7, forward_only=True)


def evaluate_without_hooks(model):
    with hooks_off(model):
        evaluate(model)


def read(model):
    with hooks_off(model):
        model.parameters()


WAYS = "plain loop", "TrainStep"
BETWEEN = {action.__name__: action for action in (nothing, evaluate, evaluate_without_hooks, read)}


def in_a_plain_loop(model, step, between):
    """Make a step of two calls by hand, and return the gradient norm."""
    batches = model.microbatches(step, 4)
    model.zero_grad()
    config = model.config
    finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, None
    with model.chunks[0].no_sync():
        model.forward_backward(microbatches=batches[:2], **MEAN)
    between(model)
    config.finalize_model_grads_func = finalize
    model.forward_backward(microbatches=batches[2:], **MEAN)
    for bucket_group in model.chunks[0].bucket_groups:
        for bucket in bucket_group.buckets:
            bucket.grad_data /= 2  # the mean of the means of two calls
    return float(model.optimizer.step()[1])


def in_a_train_step(train_step, model, step, between):
    batches = model.microbatches(step, 4)
    with train_step:
        for piece in (batches[:1], batches[1:]):
            train_step.forward_backward(
                forward_step_func=partial(forward_step, **MEAN),
                data_iterator=iter(piece),
                num_microbatches=len(piece),
                seq_length=model.seq,
                micro_batch_size=2,
            )
            between(model)
        result = train_step.finish()
    return float(result.grad_norm)


def off(model, expected):
    """The largest difference of any parameter."""
    model.gather_parameters()
    return max(float((value - expected[name]).abs().max()) for name, value in model.parameters().items())


def job(rank, world_size):
    init_parallel()
    plain = whole()
    reference = [
        (float(plain.train_step(step, num_microbatches=4, **MEAN).grad_norm), plain.parameters())
        for step in range(STEPS)
    ]
    for name, between in BETWEEN.items():
        for way in WAYS:
            yield (way, name), partial(steps_in_calls, way, between, reference)
    yield "raised", partial(after_a_pass_that_raised, reference)


def steps_in_calls(way, between, reference):
    """Return the largest relative difference of gradient norms, and of parameters."""
    model = layer_wise(layers=4)
    take = (
        partial(in_a_train_step, TrainStep(model.chunks, model.optimizer))
        if way == "TrainStep"
        else in_a_plain_loop
    )
    found = [0.0, 0.0]
    for step, (norm, parameters) in enumerate(reference):
        found[0] = max(found[0], abs(take(model, step, between) / norm - 1))
        found[1] = max(found[1], off(model, parameters))
    return found


def _raise(*ignored):
    raise Interrupted


def after_a_pass_that_raised(reference):
    model = layer_wise(layers=4)
    model.train_step(0, num_microbatches=4, **MEAN)
    layer = model.chunks[0].module.decoder.layers[0]
    handle = layer.register_forward_hook(_raise)  # the gather of the next one is under way by then
    with contextlib.suppress(Interrupted):
        model.forward_backward(9)
    handle.remove()
    for chunk in model.chunks:
        chunk.disable_forward_pre_hook()
    return max(float((value - reference[0][1][name]).abs().max()) for name, value in model.parameters().items())


unpatched = cells_of(job, 2, env=UNPATCHED)
patched = cells_of(job, 2)
patched_on_4 = cells_of(job, 4)


def cases():
    return pytest.mark.parametrize(("way", "between"), [(way, name) for way in WAYS for name in BETWEEN])


@cases()
@pytest.mark.quick
def test_without_the_patch_a_forced_gather_wipes_gradients(unpatched, way, between):
    wipes = minor() >= 18 and between in ("evaluate_without_hooks", "read")
    for found in unpatched:
        assert (max(found[way, between]) > 0.01) is wipes, found[way, between]


@cases()
@pytest.mark.quick
def test_steps_in_calls_are_those_of_one_call(patched, way, between):
    for found in patched:
        assert max(found[way, between]) < 1e-5, found[way, between]


@cases()
@pytest.mark.nightly
def test_so_they_are_on_4_ranks(patched_on_4, way, between):
    for found in patched_on_4:
        assert max(found[way, between]) < 1e-5, found[way, between]


def test_after_a_pass_that_raised_parameters_are_those_of_the_last_step(unpatched, patched):
    for before, found in zip(unpatched, patched, strict=True):
        assert before["raised"] > 0.01
        assert found["raised"] < 1e-5
