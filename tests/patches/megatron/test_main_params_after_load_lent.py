"""Weights that a correct program lends to a model, 2 ranks: the next steps are as without megapatch, bit for bit.

What was meant by a load that no checkpoint explains is not guessed: a WARNING names the line and what to call.
"""

import importlib
import logging
from functools import partial

import pytest
import torch
from rigs.cells import cells_of
from rigs.megatron.main_params import (
    equal,
    followed,
    load_weights,
    mains,
    restore_weights,
    train,
    trained,
    weights,
)
from rigs.megatron.options import BOTH, UNPATCHED

from megapatch.testing import init_parallel
from megapatch.weight_sync import lent_weights

SHARDED = {"optimizer": "adam", "lr": 0.05, "use_distributed_optimizer": True}
CASES = {
    "bf16": ({}, {"dtype": "bf16", "lr": 0.05}),
    "bf16 distributed": ({}, {**SHARDED, "dtype": "bf16"}),
    "bf16 overlapped": ({}, {**BOTH, **SHARDED, "dtype": "bf16"}),
    "fp16 distributed experts": ({"ep": 2}, {**SHARDED, "dtype": "fp16", "experts": 4}),
}


def changed(state, change):
    return [
        {name: change(value) if torch.is_tensor(value) else value for name, value in chunk.items()}
        for chunk in state
    ]


def quantized(state):
    return changed(state, lambda value: (value * 16).round() / 16)


def quantization_aware(options, load=load_weights):
    """Load quantized weights before each forward pass; the optimizer keeps full precision."""
    model = trained(options, 0)
    for step in (1, 2, 3):
        load(model, quantized(weights(model)))
        model.train_step(step)
    return followed(model)


def rolled_back_in_memory(options):
    model = trained(options, 0)
    copy = weights(model)
    train(model, 1, 2)
    load_weights(model, copy)
    return followed(model, 3)


def evaluated_before_its_step(options):
    """Load a checkpoint's weights between a backward pass and its step, which brings the model's own back."""
    model = trained(options, 0, 1)
    others = changed(weights(model), lambda value: value / 2)
    model.zero_grad()
    model.forward_backward(2)
    restore_weights(model, others)
    model.forward_backward(2, forward_only=True)
    model.optimizer.step()
    return followed(model, 3)


def saved_while_swapped(options):
    """Save the optimizer's state while a reference is in the model; returns that, too."""
    model = trained(options, 0, 1)
    own = weights(model)
    for load in (load_weights, restore_weights):
        load(model, changed(own, lambda value: value / 2))
        model.optimizer.state_dict()
        found = mains(model)
        load_weights(model, own)
    train(model, 2)
    return [*found, *mains(model)], model.parameters()


def reloaded_by_hand(options):
    """Load weights and say what they are for, with Megatron's own call."""
    model = trained(options, 0, 1)
    restore_weights(model, changed(weights(model), lambda value: value / 2))
    model.optimizer.reload_model_params()
    return followed(model, 2)


def lent(options):
    with lent_weights():
        return quantization_aware(options, restore_weights)


def taken_over(options):
    """A checkpoint's weights, loaded alone and trained on: what the patch is for."""
    model = trained(options, 0, 1)
    saved = weights(model)
    train(model, 2)
    restore_weights(model, saved)
    return followed(model, 3)


SILENT = {"saved while swapped": saved_while_swapped, "reloaded by hand": reloaded_by_hand, "lent": lent}
LEFT_ALONE = {
    "quantization-aware": quantization_aware,
    "rolled back in memory": rolled_back_in_memory,
    "evaluated before its step": evaluated_before_its_step,
}
WRONG_WITHOUT = {"bf16 overlapped": {"evaluated before its step"}}
"""A gather before the step is its last one, upstream: megatron.gathered-when-read repairs that."""
PROGRAMS = {**SILENT, **LEFT_ALONE, "taken over": taken_over}


class Heard(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def run(program, options):
    importlib.import_module("megapatch.patches.megatron.main_params_after_load")._said.clear()
    heard = Heard()
    logging.getLogger("megapatch").addHandler(heard)
    try:
        return PROGRAMS[program](options), [text for text in heard.texts if "main-params-after-load" in text]
    finally:
        logging.getLogger("megapatch").removeHandler(heard)


def job(rank, world_size):
    for case, (layout, options) in CASES.items():
        init_parallel(**layout)
        for program in set(PROGRAMS) - WRONG_WITHOUT.get(case, set()):
            yield (case, program), partial(run, program, options)


plain = cells_of(job, 2, env=UNPATCHED)
patched = cells_of(job, 2)


@pytest.mark.parametrize("program", [*SILENT, *LEFT_ALONE])
@pytest.mark.parametrize("case", CASES)
def test_lent_weights_end_as_without_megapatch(plain, patched, case, program):
    if program in WRONG_WITHOUT.get(case, ()):
        return
    for without, found in zip(plain, patched, strict=True):
        its, the = without[case, program][0], found[case, program][0]
        assert equal(the[0], its[0])
        assert equal(the[1].values(), its[1].values())


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_load_that_differs_is_said_once_a_line(patched, program):
    for found in patched:
        texts = found["bf16", program][1]
        if program in SILENT:
            assert texts == []
            continue
        (text,) = texts
        outcome = "main parameters follow" if program == "taken over" else "are left alone, as without megapatch"
        assert outcome in text
        assert "main_params.py:" in text
        assert "reload_model_params()" in text
        assert "lent_weights()" in text


@pytest.mark.parametrize("case", CASES)
def test_what_the_patch_is_for_differs_without_it(plain, patched, case):
    for without, found in zip(plain, patched, strict=True):
        (_, its), _ = without[case, "taken over"]
        (_, the), _ = found[case, "taken over"]
        assert not equal(the.values(), its.values())
