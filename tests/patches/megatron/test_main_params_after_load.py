"""megatron.main-params-after-load on the real optimizers, bf16 and fp16, 2 ranks.

After a load of a checkpoint's weights alone the next steps are, bit for bit, those of new objects that have loaded
them. A load that may have been meant otherwise is not guessed: a WARNING names the line and what to call. Such
programs end as without megapatch, bit for bit; no_harm/loads.py has more of them.
"""

import importlib
import os
from functools import partial
from unittest import mock

import pytest
import torch
from rigs.cells import cells_of
from rigs.log import Log
from rigs.megatron.main_params import (
    equal,
    followed,
    forget_moments,
    load_optimizer,
    load_weights,
    mains,
    new_with,
    optimizer_state,
    prepare,
    restore_weights,
    same,
    train,
    trained,
    weights,
)
from rigs.megatron.offloading import OFFLOADS, offloading
from rigs.megatron.options import BOTH, UNPATCHED, attempt
from rigs.megatron.shapes import shaped

from megapatch._verify.checks.loads import read_back
from megapatch.testing import init_parallel, tiny_gpt
from megapatch.weight_sync import lent_weights

ADAM = {"optimizer": "adam", "lr": 0.05}
SHARDED = {**ADAM, "use_distributed_optimizer": True}
CASES = {  # a case with experts has a chain of two optimizers
    "bf16": shaped("stages, tied", dtype="bf16", lr=0.05),
    "bf16 distributed": shaped("dense", **SHARDED, dtype="bf16"),
    "bf16 overlapped": shaped("two chunks", **{**BOTH, **SHARDED}, dtype="bf16"),
    "fp16": shaped("dense", dtype="fp16", lr=0.05),
    "fp16 distributed experts": shaped("experts, tied", **SHARDED, dtype="fp16"),
}


# ------------------------------------------------------------------------ what a run does
def gone_back(options):
    """Load weights alone into objects that have trained on; the reference is Megatron's own call, in new ones."""
    model = trained(options, 0, 1)
    saved = weights(model)
    train(model, 2, 3)
    restore_weights(model, saved)
    forget_moments(model)
    new = new_with(options, saved)
    return same(followed(model, 4, 5), followed(new, 4, 5))


def started(options):
    """Load weights alone into new objects."""
    saved = weights(trained(options, 0, 1))
    model = tiny_gpt(**options)
    restore_weights(model, saved)
    return same(followed(model, 2, 3), followed(new_with(options, saved), 2, 3))


def started_offloaded():
    """The same with an optimizer that steps copies on the host of half of its main parameters."""
    with offloading(OFFLOADS["half"]):
        return started({**SHARDED, "dtype": "bf16", "optim": OFFLOADS["half"]})


def halved(state):
    return [
        {name: value / 2 if torch.is_tensor(value) else value for name, value in chunk.items()} for chunk in state
    ]


def swapped(options):
    """Load other weights, run them, and load the first ones back: as if that had not been."""
    model, twin = trained(options, 0, 1), trained(options, 0, 1)
    mine = weights(model)
    restore_weights(model, halved(mine))
    model.forward_backward(7, forward_only=True)
    load_weights(model, mine)
    return same(followed(model, 2, 3), followed(twin, 2, 3))


def went_back_whole(options, order):
    """Load weights and optimizer, in this order, into objects that have trained on, and go the same way again."""
    model = trained(options, 0, 1)
    saved = {load_weights: weights(model), load_optimizer: optimizer_state(model)}
    expected = followed(model, 2, 3)
    for load in order:
        load(model, saved[load])
    return same(followed(model, 2, 3), expected)


def loaded_lagging_weights(options):
    """Load weights that are older than the optimizer which is loaded after them, as a save before a gather has."""
    model = trained(options, 0, 1)
    old = weights(model)
    train(model, 2)
    expected, saved = mains(model), optimizer_state(model)
    train(model, 3)
    restore_weights(model, old)
    load_optimizer(model, saved)
    changed = [not torch.equal(one, other) for one, other in zip(mains(model), expected, strict=True)]
    prepare(model)
    return not any(changed) and equal(mains(model), expected)


def loaded_in_part(options):
    """Load one parameter: the main parameters of all others keep every bit."""
    model = trained(options, 0, 1)
    before, (state, *_) = mains(model), weights(model)
    name = next(name for name in state if name.endswith("linear_fc1.weight"))
    (of_checkpoint,) = read_back({"chunks": [{name: state[name] + 1}]})["chunks"]
    model.chunks[0].load_state_dict(of_checkpoint, strict=False)
    prepare(model)
    changed = [not torch.equal(one, other) for one, other in zip(mains(model), before, strict=True)]
    return sum(changed)


def failed(options):
    """Load what lacks a parameter: it raises, and the next step is that of a model which loaded nothing."""
    model = trained(options, 0, 1)
    before, (state, *_) = mains(model), weights(tiny_gpt(**options))
    state.pop(next(name for name in state if name.endswith("linear_fc1.weight")))
    error, text = attempt(model.chunks[0].load_state_dict, *read_back({"chunks": [state]})["chunks"])
    prepare(model)
    unchanged = equal(mains(model), before)
    return error, "Missing key" in text, unchanged


def ordinary(options):
    """Steps look for nothing that was loaded."""
    module = importlib.import_module("megapatch.patches.megatron.main_params_after_load")
    model = trained(options, 0)
    with mock.patch.object(module, "_agree") as agree:
        train(model, 1, 2)
    return agree.call_count


ORDERS = {"model first": (load_weights, load_optimizer), "optimizer first": (load_optimizer, load_weights)}
RUNS = {
    "gone back": gone_back,
    "started": started,
    "swapped": swapped,
    **{name: partial(went_back_whole, order=order) for name, order in ORDERS.items()},
    "lagging weights": loaded_lagging_weights,
    "in part": loaded_in_part,
    "failed": failed,
    "ordinary": ordinary,
}


LOADS = ("gone back", "started")


def job(rank, world_size, names):
    for case, (layout, options) in CASES.items():
        init_parallel(**layout)
        for name in names:
            yield (case, name), partial(RUNS[name], options)


unpatched = cells_of(partial(job, names=LOADS), 2, env=UNPATCHED)
patched = cells_of(partial(job, names=LOADS), 2)
others = cells_of(partial(job, names=[name for name in RUNS if name not in LOADS]), 2)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick
def test_without_the_patch_a_load_of_weights_is_undone(unpatched, case):
    for found in unpatched:
        assert [found[case, name] for name in LOADS] == [False] * len(LOADS)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick
def test_steps_are_those_of_new_objects_that_loaded_the_same(patched, case):
    for found in patched:
        assert [found[case, name] for name in LOADS] == [True] * len(LOADS)


@pytest.mark.parametrize("name", ["swapped", *ORDERS, "lagging weights"])
@pytest.mark.parametrize("case", CASES)
def test_main_parameters_that_are_right_keep_every_bit(others, case, name):
    for found in others:
        assert found[case, name] is True


@pytest.mark.parametrize("case", CASES)
def test_only_what_was_loaded_changes(others, case):
    assert sum(found[case, "in part"] for found in others) in (1, 2)
    for found in others:
        assert found[case, "in part"] <= 1
        assert found[case, "failed"] == ("RuntimeError", True, True)
        assert found[case, "ordinary"] == 0


# ------------------------------------------------------------------------ what is said, in bf16
def quantization_aware(options, load=load_weights):
    """Load quantized weights before each forward pass; the optimizer keeps full precision."""
    model = trained(options, 0)
    for step in (1, 2):
        own = weights(model)
        quantized = [{name: _rounded(value) for name, value in chunk.items()} for chunk in own]
        load(model, quantized)
        model.train_step(step)
    return followed(model)


def _rounded(value):
    return (value * 16).round() / 16 if torch.is_tensor(value) else value


def lent(options):
    with lent_weights():
        return quantization_aware(options, restore_weights)


def rolled_back_in_memory(options):
    model = trained(options, 0)
    copy = weights(model)
    train(model, 1)
    load_weights(model, copy)
    return followed(model, 2)


def with_one_tensor_cast(options):
    """Load a checkpoint's weights of which one tensor was cast on the way."""
    model = trained(options, 0)
    saved = read_back({"chunks": weights(model)})["chunks"]
    train(model, 1)
    name = next(name for name, value in saved[0].items() if torch.is_tensor(value))
    saved[0][name] = saved[0][name].float().to(saved[0][name].dtype)
    load_weights(model, saved)
    return followed(model, 2)


def evaluated_before_its_step(options):
    """Load a checkpoint's weights between a backward pass and its step, which brings the model's own back."""
    model = trained(options, 0)
    model.zero_grad()
    model.forward_backward(1)
    restore_weights(model, halved(weights(model)))
    model.optimizer.step()
    return followed(model, 2)


def saved_while_swapped(options):
    """Save the optimizer's state while a reference is in the model."""
    model = trained(options, 0)
    own = weights(model)
    for load in (load_weights, restore_weights):
        load(model, halved(own))
        model.optimizer.state_dict()
        load_weights(model, own)
    return followed(model, 1)


def reloaded_by_hand(options):
    """Load weights and say what they are for, with Megatron's own call."""
    model = trained(options, 0)
    restore_weights(model, halved(weights(model)))
    model.optimizer.reload_model_params()
    return followed(model, 1)


def taken_over(options):
    """A checkpoint's weights, loaded alone and trained on: what the patch is for."""
    model = trained(options, 0)
    saved = weights(model)
    train(model, 1)
    restore_weights(model, saved)
    return followed(model, 2)


SILENT = (lent, saved_while_swapped, reloaded_by_hand)
LEFT_ALONE = (quantization_aware, rolled_back_in_memory, with_one_tensor_cast, evaluated_before_its_step)
PROGRAMS = (*SILENT, *LEFT_ALONE, taken_over)


def said_by(program):
    """Return what the program ends with, and what is said of its loads."""
    importlib.import_module("megapatch.patches.megatron._weights_alone")._said.clear()
    log = Log()
    return program(CASES["bf16"][1]), [text for text in log.texts if "main-params-after-load" in text]


def programs(rank, world_size):
    init_parallel()
    for program in PROGRAMS:
        yield program.__name__, partial(said_by, program)
    if not UNPATCHED.items() <= os.environ.items():
        yield "offloaded", started_offloaded


plain = cells_of(programs, 2, env=UNPATCHED)
said = cells_of(programs, 2)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_load_that_differs_is_said_once_a_line(plain, said, program):
    for without, found in zip(plain, said, strict=True):
        ended, texts = found[program.__name__]
        assert same(ended, without[program.__name__][0]) is (program is not taken_over)
        if program in SILENT:
            assert texts == []
            continue
        (text,) = texts
        outcome = "main parameters follow" if program is taken_over else "are left alone, as without megapatch"
        assert outcome in text
        assert "main_params.py:" in text
        assert "reload_model_params()" in text
        assert "lent_weights()" in text


def test_the_copies_of_an_offloaded_optimizer_follow(said):
    assert [found["offloaded"] for found in said] == [True, True]
