"""Steps in slices that were interrupted and aborted: the next one, in slices or not, is that of a fresh worker."""

import contextlib
import functools
import importlib
import os
from unittest import mock

import pytest
from rigs.imported import run_with_megatron
from rigs.megatron.options import Interrupted
from rigs.nemo_rl.steps import (
    LAYOUTS,
    SIZE,
    assert_no_difference,
    compared_after,
    differences,
    in_slices,
    trained_gpt,
    whole,
)
from rigs.nemo_rl.worker import SHAPES, WORKER, batch, find_nemo_rl, has_own_split_step, nll_loss

from megapatch.testing import init_parallel

pytestmark = pytest.mark.thorough

NEXT = {"in slices": in_slices((2, 6)), "train()": whole}


def second_call_fails(function):
    calls = []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise Interrupted
        return function(*args, **kwargs)

    return failing


def failing_in_loss(worker, loss):
    cls = type(loss)
    failing = second_call_fails(cls.__call__)
    loss.__class__ = type(cls.__name__, (cls,), {"__call__": lambda *args, **kwargs: failing(*args, **kwargs)})
    return contextlib.nullcontext()


def failing_in_iterator(worker, loss):
    module = importlib.import_module(WORKER)
    make = module.get_microbatch_iterator

    @functools.wraps(make)
    def make_failing(*args, **kwargs):
        iterator, *others = make(*args, **kwargs)

        def failing():
            yield next(iterator)
            raise Interrupted

        return failing(), *others

    return mock.patch.object(module, "get_microbatch_iterator", make_failing)


def failing_in_optimizer(worker, loss):
    return mock.patch.object(worker.optimizer, "step", side_effect=Interrupted)


FAULTS = {"loss": failing_in_loss, "iterator": failing_in_iterator, "optimizer": failing_in_optimizer}


def interrupted(fault):
    def before(worker):
        loss = nll_loss()
        worker.begin_train_step(loss, gbs=SIZE * worker.dp_size)
        with contextlib.suppress(Interrupted), FAULTS[fault](worker, loss):
            worker.train_microbatch(batch(7, 4))
            worker.finish_train_step()
            raise AssertionError("nothing was raised")
        worker.abort_train_step()
        worker.abort_train_step()  # as often as one likes
        assert worker._train_step_state is None
        with pytest.raises(RuntimeError, match="no train step open"):
            worker.finish_train_step()

    return before


def compared(rank, world_size):
    return compared_after(("dp2", "dp2, distributed optimizer, both"), NEXT, FAULTS, interrupted)


@pytest.mark.parametrize("shape", SHAPES)
def test_after_an_aborted_step_the_next_is_a_fresh_one(shape):
    ranks = run_with_megatron(compared, 2, setup=find_nemo_rl, timeout=300, env={"NEMO_RL_SHAPE": shape})
    assert_no_difference(ranks, cells=12, limit=1e-5)


def begins_and_ends(rank, world_size):
    def misused(worker):
        for call in (worker.finish_train_step, lambda: worker.train_microbatch(batch(0, 4))):
            with pytest.raises(RuntimeError, match="no train step open; begin_train_step must be called first"):
                call()
        if not has_own_split_step(os.environ["NEMO_RL_SHAPE"]):
            positive = nll_loss()
            positive.positive_example_nll_weight = 0.1
            with pytest.raises(RuntimeError, match="positive_example_nll_weight"):
                worker.begin_train_step(positive)
        worker.begin_train_step(nll_loss())
        with pytest.raises(RuntimeError, match="already open"):
            worker.begin_train_step(nll_loss())
        worker.abort_train_step()

    with contextlib.redirect_stdout(None):
        init_parallel()
        trained_gpt({}, "nll", whole, before=misused)


@pytest.mark.parametrize("shape", SHAPES)
def test_calls_in_a_wrong_order_are_told(shape):
    run_with_megatron(begins_and_ends, 1, setup=find_nemo_rl, env={"NEMO_RL_SHAPE": shape})


# ---------------------------------------------------------------------------- main without the patches
def drifting(rank, world_size):
    with contextlib.redirect_stdout(None):
        where, options = LAYOUTS["dp2, distributed optimizer, both"]
        init_parallel(**where)
        ours, expected = (trained_gpt(options, "nll", step) for step in (in_slices((4, 4)), whole))
        return differences(ours, expected)["parameters"]


@pytest.mark.parametrize("shape", SHAPES)
def test_without_the_patch_ranks_drift_apart(shape):
    if not has_own_split_step(shape):
        pytest.skip("the release has no step in slices")
    env = {"NEMO_RL_SHAPE": shape, "MEGAPATCH_DISABLE": "nemo_rl.forward-pre-hook-after-split"}
    for difference in run_with_megatron(drifting, 2, setup=find_nemo_rl, env=env):
        assert difference > 1e-3


def dying(rank, world_size):
    with contextlib.redirect_stdout(None):
        init_parallel()
        with pytest.raises(UnboundLocalError, match="losses_reduced"):
            trained_gpt({}, "nll", in_slices((4, 4)), before=interrupted("loss"))


@pytest.mark.parametrize("shape", SHAPES)
def test_without_the_patch_the_step_after_an_aborted_one_dies(shape):
    if not has_own_split_step(shape):
        pytest.skip("the release has no step in slices")
    # The other one rewinds the machine as soon as a call raises.
    disabled = "nemo_rl.abort-resets-rerun,nemo_rl.train-after-exception"
    env = {"NEMO_RL_SHAPE": shape, "MEGAPATCH_DISABLE": disabled}
    run_with_megatron(dying, 1, setup=find_nemo_rl, env=env)
