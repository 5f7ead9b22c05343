"""nemo_rl.split-train-step: the four methods on NeMo-RL's own worker against its own train(), at 2 ranks."""

import contextlib
import itertools
from functools import partial
from unittest import mock

import pytest
import torch
from rigs.cells import once, run_cells
from rigs.megatron.options import assert_same_parameters
from rigs.nemo_rl.steps import (
    LAYOUTS,
    LOSSES,
    SIZE,
    SLICES,
    SPLIT_KEYS,
    differences,
    in_slices,
    trained_gpt,
    whole,
)
from rigs.nemo_rl.worker import GPT, SHAPES, batch, find_nemo_rl, has_own_split_step, worker_for
from rigs.where import chosen, with_nightly

from megapatch.testing import init_parallel, tiny_gpt

pytestmark = pytest.mark.thorough


def compared(rank, world_size, wanted):
    with contextlib.redirect_stdout(None):
        for name, (layout, options) in LAYOUTS.items():
            init_parallel(**layout)
            for loss in LOSSES:
                expected = once(trained_gpt, options, loss, whole)
                for cut, sizes in SLICES.items():
                    if (name, loss, cut) in wanted:
                        yield (name, loss, cut), partial(cell, expected, options, loss, sizes)


def cell(expected, options, loss, sizes):
    reference = expected()
    return differences(trained_gpt(options, loss, in_slices(sizes)), reference)


@pytest.fixture(scope="module", params=SHAPES)
def shape(request):
    return request.param


@pytest.fixture(scope="module")
def ranks(request, shape):
    env = {"NEMO_RL_SHAPE": shape}
    wanted = chosen(request, "layout", "loss", "cut")
    return run_cells(compared, 2, wanted, audited=True, setup=find_nemo_rl, env=env)


@pytest.mark.parametrize(("layout", "loss", "cut"), with_nightly([*itertools.product(LAYOUTS, LOSSES, SLICES)]))
def test_a_step_in_slices_is_that_of_train(ranks, layout, loss, cut):
    for found in ranks:
        differences = found[layout, loss, cut]
        assert differences.pop("keys") == SPLIT_KEYS
        assert {name: value for name, value in differences.items() if value > 1e-5} == {}


# ---------------------------------------------------------------------------- as train() does, in releases
OURS = [shape for shape in SHAPES if not has_own_split_step(shape)]


def on_one_rank(rank, world_size):
    with contextlib.redirect_stdout(None):
        init_parallel()
        yield "dropout", with_dropout
        yield "overflow", overflowing
        yield "inference", after_inference
        yield "memory", memory_let_go
        yield "nothing", nothing_counts


def with_dropout():
    """How far from train() are steps in slices with log-probabilities between them, and steps without dropout."""
    dropout, found = {"config": {"hidden_dropout": 0.3}}, []
    for options, take_step in ((dropout, whole), (dropout, in_slices((2, 6), between=logprobs)), ({}, whole)):
        torch.manual_seed(1)
        found.append(trained_gpt(options, "nll", take_step))
    expected, *others = found
    return [differences(one, expected)["parameters"] for one in others]


def logprobs(worker):
    worker.get_logprobs(data=batch(9, 4))
    assert not worker.model.training


def overflowing():
    """A step in slices whose gradient overflows: the scheduler moves as after train(), the parameters stay."""
    ddp = {**GPT["ddp"], "check_for_nan_in_grad": False}  # as Megatron has it in fp16
    options = {"dtype": "fp16", "loss_scale": 2.0**40, "optim": {"hysteresis": 1}, "ddp": ddp}
    model = tiny_gpt(**{**GPT, **options})
    worker, before = worker_for(model), model.parameters()
    rate = worker.optimizer.param_groups[0]["lr"]
    told = in_slices((4, 4))(worker, 0, LOSSES["nll"]())
    rates = rate, worker.optimizer.param_groups[0]["lr"]
    return float(told["grad_norm"]), worker.scheduler.num_steps, rates, before, model.parameters()


def after_inference():
    """Open and abort a step after inference, and return what is left of that in the model."""
    worker, resets = worker_for(tiny_gpt(**GPT)), []
    _, *modules = worker.model.modules()
    worker.model.inference_params = modules[0]._inference_key_value_memory = "much memory"
    modules[-1].reset_inference_cache = lambda: resets.append("reset")
    worker.begin_train_step(LOSSES["nll"]())
    worker.abort_train_step()
    return worker.model.inference_params, modules[0]._inference_key_value_memory, resets


def nothing_counts():
    """A step in slices in which no sample counts: the scheduler moves, the parameters stay."""

    def masked(data):
        data["sample_mask"] = data["sample_mask"] * 0
        return data

    model = tiny_gpt(**GPT)
    worker, before = worker_for(model), model.parameters()
    told = in_slices((4, 4), masked)(worker, 0, LOSSES["nll"]())
    found = float(told["grad_norm"]), float(told["global_loss"]), worker.scheduler.num_steps
    return *found, before, model.parameters()


def memory_let_go():
    """By level of the setting, how often memory is let go: in a step of two calls, and then at its end."""
    found = []
    for level in (0, 1, 2):
        worker = worker_for(tiny_gpt(**GPT), {"megatron_cfg": {"empty_unused_memory_level": level}})
        with mock.patch("torch.cuda.empty_cache") as let_go:
            in_slices((4, 4), between=lambda worker, let_go=let_go: found.append(let_go.call_count))(
                worker, 0, LOSSES["nll"]()
            )
        found.append(let_go.call_count)
    return found


@pytest.fixture(scope="module", params=OURS)
def alone(request):
    (found,) = run_cells(on_one_rank, 1, setup=find_nemo_rl, env={"NEMO_RL_SHAPE": request.param})
    return found


def test_dropout_is_on_again_after_log_probabilities_between_slices(alone):
    in_slices_of_it, without = alone["dropout"]
    assert in_slices_of_it < 1e-5
    assert without > 1e-3


def test_the_scheduler_steps_after_an_overflow(alone):
    """It does in train(), whatever the optimizer says."""
    grad_norm, samples, rates, before, after = alone["overflow"]
    assert (grad_norm, samples) == (0.0, SIZE)
    assert rates[1] > rates[0]
    assert_same_parameters(after, before)


def test_what_inference_has_left_is_dropped_as_in_train(alone):
    assert alone["inference"] == (None, None, ["reset"])


def test_a_step_in_which_nothing_counts_leaves_parameters(alone):
    *told, before, after = alone["nothing"]
    assert told == [0.0, 0.0, SIZE]
    assert_same_parameters(after, before)


def test_memory_is_let_go_as_the_setting_says(alone):
    assert alone["memory"] == [0, 0, 0, 1, 2, 2, 1, 2, 3]
