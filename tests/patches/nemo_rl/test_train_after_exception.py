"""nemo_rl.train-after-exception: after a call that raised, the next one is that of a fresh worker; so is it after
steps in slices that were interrupted and aborted.

A dropped step of a mixture of experts leaves nothing outside of gradients either.
"""

import contextlib
import functools
import importlib
import logging
import os
from types import SimpleNamespace
from unittest import mock

import pytest
from rigs.imported import run_with_megatron
from rigs.log import Log
from rigs.megatron.options import Interrupted, attempt, hooks_of
from rigs.nemo_rl.steps import (
    LAYOUTS,
    SIZE,
    assert_no_difference,
    compared_after,
    differences,
    in_slices,
    set_up,
    trained_gpt,
    whole,
)
from rigs.nemo_rl.worker import SHAPES, WORKER, batch, find_nemo_rl, has_own_split_step, nll_loss
from rigs.step_state import ROUTERS, held, logged_by_process, raising_after

from megapatch.testing import init_parallel

pytestmark = pytest.mark.thorough

PATCH = "nemo_rl.train-after-exception"


# ------------------------------------------------------------------------------------------ the faults
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


def failing_in_backward(worker, loss):
    """Raise when the first layer is differentiated in the last microbatch, with reduces under way."""
    layer, passes = worker.model.module.decoder.layers[0], []

    def hook(*ignored):
        passes.append(1)
        if len(passes) == 4:
            raise Interrupted

    handle = layer.register_full_backward_hook(hook)
    stack = contextlib.ExitStack()
    stack.callback(handle.remove)
    return stack


FAULTS = {
    "loss": failing_in_loss,
    "iterator": failing_in_iterator,
    "optimizer": lambda worker, loss: mock.patch.object(worker.optimizer, "step", side_effect=Interrupted),
    "backward": failing_in_backward,
    "after finalize": lambda worker, loss: raising_after(worker.model.config, "finalize_model_grads_func"),
    "in the optimizer": lambda worker, loss: raising_after(worker.optimizer, "prepare_grads"),
}


# ------------------------------------------------------------------------------------------ train()
def interrupted(fault):
    def before(worker):
        loss, hooks = nll_loss(), hooks_of(worker.model.config)
        with FAULTS[fault](worker, loss):
            error, _ = attempt(worker.train, batch(7, SIZE), loss, gbs=SIZE * worker.dp_size)
        assert error == "Interrupted"
        assert hooks_of(worker.model.config) == hooks

    return before


def compared(rank, world_size):
    layouts, found = ("dp2, overlap", "dp2, distributed optimizer, both"), {}
    for good_steps in (0, 1):  # from the second step on Megatron reduces in the backward pass
        after = compared_after(
            layouts, {"whole": whole}, ("loss", "iterator", "backward"), interrupted, good_steps
        )
        found |= {(good_steps, *cell): differences for cell, differences in after.items()}
    return found


@pytest.mark.parametrize(
    ("shape", "patches"),
    [
        *[(shape, "*") for shape in SHAPES],
        (SHAPES[0], PATCH),  # megatron.parameters-without-gradients, too, forgets parts of a first step
    ],
)
def test_the_next_train_is_that_of_a_fresh_worker(shape, patches):
    env = {"NEMO_RL_SHAPE": shape, "MEGAPATCH_ONLY": patches}
    ranks = run_with_megatron(compared, 2, setup=find_nemo_rl, env=env)
    assert_no_difference(ranks, cells=12, limit=1e-5)


def fails(rank, world_size):
    with contextlib.redirect_stdout(None):
        init_parallel()
        return attempt(trained_gpt, {}, "nll", whole, before=interrupted("loss"))[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_without_the_patch_it_fails(shape):
    env = {"NEMO_RL_SHAPE": shape, "MEGAPATCH_DISABLE": PATCH}
    for error in run_with_megatron(fails, 2, setup=find_nemo_rl, env=env):
        assert error in ("UnboundLocalError", "ValueError")


def timed_twice(rank, world_size):
    log = Log()
    logging.getLogger("megapatch").setLevel(logging.WARNING)
    timer = importlib.import_module("nemo_rl.utils.timer").Timer()
    with contextlib.redirect_stdout(None), mock.patch("time.perf_counter", iter([1.0, 5.0, 7.0]).__next__):
        timer.start("train")
        timer.start("train")
        return timer.stop("train"), log.texts


def test_a_timer_that_was_left_running_is_started_again():
    ((elapsed, texts),) = run_with_megatron(timed_twice, 1, setup=find_nemo_rl)
    assert elapsed == 2.0
    assert [text for text in texts if "timer 'train' was still running" in text]


# ------------------------------------------------------------------------------------------ steps in slices
def interrupted_in_slices(fault):
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


def compared_in_slices(rank, world_size):
    ways = {"in slices": in_slices((2, 6)), "train()": whole}
    faults = ("loss", "iterator", "optimizer")
    return compared_after(("dp2", "dp2, distributed optimizer, both"), ways, faults, interrupted_in_slices)


@pytest.mark.parametrize("shape", SHAPES)
def test_after_an_aborted_step_the_next_is_a_fresh_one(shape):
    ranks = run_with_megatron(compared_in_slices, 2, setup=find_nemo_rl, env={"NEMO_RL_SHAPE": shape})
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
            trained_gpt({}, "nll", in_slices((4, 4)), before=interrupted_in_slices("loss"))


@pytest.mark.parametrize("shape", SHAPES)
def test_without_the_patch_the_step_after_an_aborted_one_dies(shape):
    if not has_own_split_step(shape):
        pytest.skip("the release has no step in slices")
    # The other one rewinds the machine as soon as a call raises.
    disabled = "nemo_rl.abort-resets-rerun,nemo_rl.train-after-exception"
    env = {"NEMO_RL_SHAPE": shape, "MEGAPATCH_DISABLE": disabled}
    run_with_megatron(dying, 1, setup=find_nemo_rl, env=env)


# ------------------------------------------------------------------------------------------ a mixture of experts
EXPERTS = {"experts": 4, "config": ROUTERS}


FAULTS_BY_WAY = {
    "train": ("loss", "backward", "after finalize"),
    "split": ("loss", "after finalize", "in the optimizer"),
}


def train(worker, loss):
    worker.train(batch(7, SIZE), loss, gbs=SIZE * worker.dp_size)


def split(worker, loss):
    worker.begin_train_step(loss, gbs=SIZE * worker.dp_size)
    try:
        worker.train_microbatch(batch(7, SIZE))
        worker.finish_train_step()
    finally:
        worker.abort_train_step()


def dropped(way, fault, left):
    """Return a function that makes a step, and one that is dropped; `left` gets what is held around that."""

    def before(worker):
        whole(worker, 5, nll_loss())
        if fault is None:
            return
        model = SimpleNamespace(chunks=[worker.model], optimizer=worker.optimizer)
        found = held(model)
        loss = nll_loss()
        with contextlib.suppress(Interrupted), FAULTS[fault](worker, loss):
            {"train": train, "split": split}[way](worker, loss)
            raise AssertionError("nothing was raised")
        left.append((found, held(model)))

    return before


def compared_ways(rank, world_size, way):
    """By fault: the largest difference of the parameters, and what was held before and after the dropped step."""
    take_step = {"train": whole, "split": in_slices((4, 4))}[way]
    found = {}
    with contextlib.redirect_stdout(None):
        for _, options in set_up("dp2"):
            run = functools.partial(trained_gpt, {**options, **EXPERTS}, "nll", take_step)
            logged_by_process().clear()
            expected = run(before=dropped(way, None, []))
            for fault in FAULTS_BY_WAY[way]:
                logged_by_process().clear()
                got = run(before=dropped(way, fault, left := []))
                found[fault] = differences(got, expected)["parameters"], *left[0]
    return found


@pytest.mark.parametrize("way", FAULTS_BY_WAY)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_dropped_step_leaves_nothing(shape, way):
    for found in run_with_megatron(compared_ways, 2, way, setup=find_nemo_rl, env={"NEMO_RL_SHAPE": shape}):
        for fault, (difference, before, after) in found.items():
            assert difference == 0, fault
            if way == "split":
                assert after == before, fault
            else:  # the next train() zeroes the counts
                assert after[2:] == before[2:], fault
