"""slime's step without the NaN check, which fp16 with a dynamic loss scale always takes: it prepares the gradients
and then calls optimizer.step(), which prepares them. On slime's (or miles') own code where SLIME_CHECKOUT names a
checkout of it, else on an imitation. Compared with slime's other step, which only calls optimizer.step()."""

import inspect
import math

import pytest
from rigs.imported import run_with_megatron
from rigs.megatron.options import ADAM, UNPATCHED, assert_same_parameters, attempt
from rigs.slime.train import FRAMEWORK, SlimeLoop, find_slime

from megapatch.testing import init_parallel, tiny_gpt

STEPS = 5
TOO_LARGE = 2.0**18  # a loss scale at which the first step overflows; half of it fits
GROWING = {"loss_scale_window": 2}  # the loss scale doubles after so many good steps
FP16 = {"dtype": "fp16", "use_distributed_optimizer": True, "clip_grad": 0.5}


def loop_for(scale, checked, **optim):
    optim = {**ADAM["optim"], **optim}
    model = tiny_gpt(layers=4, hooks=False, loss_scale=scale, **{**ADAM, **FP16, "optim": optim})
    return SlimeLoop(model, arguments={"check_for_nan_in_loss_and_grad": checked})


def results(loop, calls, steps):
    for _ in range(calls):
        loop.train(steps)
    return loop.log, float(loop.model.optimizer.get_loss_scale()), loop.model.parameters()


def without(rank, world_size):
    """The references, with the check; and without it, the defect."""
    init_parallel()
    after_the_overflow = loop_for(TOO_LARGE / 2, checked=True)
    after_the_overflow.steps = 1
    return (
        results(loop_for(2.0**8, checked=True, **GROWING), STEPS, 1),
        results(after_the_overflow, STEPS - 1, 1),
        results(loop_for(2.0**8, checked=False, **GROWING), STEPS, 1),
        attempt(results, loop_for(TOO_LARGE, checked=True), 1, 1),
    )


def repaired(rank, world_size):
    init_parallel()
    loop = loop_for(TOO_LARGE, checked=False)
    overflow = attempt(loop.train, 1)
    loop.steps = 1
    return (
        results(loop_for(2.0**8, checked=False, **GROWING), STEPS, 1),
        results(loop, STEPS - 1, 1),
        overflow,
        "grad_norm = " in inspect.getsource(loop.module.train_one_step).partition("prepare_grads")[0],
    )


@pytest.fixture(scope="module")
def plain():
    return run_with_megatron(without, 2, env=UNPATCHED, setup=find_slime)


@pytest.fixture(scope="module")
def patched():
    return run_with_megatron(repaired, 2, setup=find_slime)


def assert_equal(got, expected):
    for (log, scale, parameters), (plain_log, plain_scale, plain_parameters) in zip(got, expected, strict=True):
        assert log == plain_log
        assert scale == plain_scale
        assert_same_parameters(parameters, plain_parameters)


def test_the_gradients_are_prepared_twice_without_the_patch(plain):
    (log, scale, _), _, (wrong_log, wrong_scale, _), _ = plain[0]
    for (_, norm), (_, wrong_norm) in zip(log, wrong_log, strict=True):
        assert wrong_norm < norm / 100
    assert wrong_scale > scale


def test_they_are_prepared_once_with_it(plain, patched):
    assert_equal([found[0] for found in patched], [found[0] for found in plain])
    assert patched[0][0][1] == 2.0**8 * 2 ** (STEPS // 2)


def test_steps_after_an_overflow_are_right(plain, patched):
    """The overflow itself: slime up to v0.2.4 fails (#1762), having skipped the step; later ones log NaN."""
    for _, (log, *_), (error, _), norm_is_set in patched:
        assert error == (None if norm_is_set else "UnboundLocalError")
        if norm_is_set and log:
            assert not math.isfinite(log[0][1]) or FRAMEWORK == "miles"  # which logs 0.0
    after = [(log[1 - STEPS :], scale, parameters) for _, (log, scale, parameters), *_ in patched]
    assert_equal(after, [found[1] for found in plain])


def test_with_the_check_an_overflow_ends_in_slimes_own_assertion(plain):
    """Megatron has this branch for bf16 and for a constant loss scale; megapatch leaves it as it is."""
    for *_, (error, _) in plain:
        assert error == "AssertionError"
