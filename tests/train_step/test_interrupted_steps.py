"""Ctrl-C at each line of a step: afterwards all is as before it, or as after it, and nothing stays refused."""

from __future__ import annotations

import pytest
import torch
from rigs.faults import Fault
from rigs.imported import run_with_megatron
from rigs.megatron.options import assert_same_parameters, attempt
from rigs.train_step.models import MEAN, in_pieces

import megapatch
from megapatch.testing import init_parallel, tiny_gpt
from megapatch.train_step import TrainStep, _guard, _megatron, _normalization, _open_steps, _step

FILES = {module.__file__ for module in (_guard, _megatron, _normalization, _open_steps, _step)}
OPTIONS = {"layers": 1, "vocab": 16, "lr": 0.05}
WATCHED = ("step", "step_with_ready_grads", "zero_grad", "zero_grad_buffer", "load_state_dict")


def scenes(model, step):
    """By name: what comes before, and what is interrupted."""

    def call(**options):
        in_pieces(step, model, 0, (1,), MEAN, **options)

    def begun_and_called():
        step.begin()
        call()

    def reduced():
        begun_and_called()
        step.reduce()

    return {
        "begin": (lambda: None, step.begin),
        "begin after a reduced step": (reduced, step.begin),
        "call": (step.begin, call),
        "last call": (begun_and_called, lambda: call(last=True)),
        "reduce": (begun_and_called, step.reduce),
        "finish": (begun_and_called, step.finish),
        "abort": (begun_and_called, step.abort),
        "abort after reduce": (reduced, step.abort),
    }


def found_by(rank, world_size):
    init_parallel()
    model, reference = tiny_gpt(**OPTIONS), tiny_gpt(**OPTIONS)
    optimizer, (chunk,) = model.optimizer, model.chunks
    step = TrainStep(model.chunks, optimizer)
    kinds = {*type(optimizer).__mro__, *type(chunk).__mro__}
    methods = {(kind, name): vars(kind).get(name) for kind in kinds for name in WATCHED}
    config, weights = dict(vars(model.config)), model.parameters()
    lines, wrong = {}, []
    for name, (before, interrupted) in scenes(model, step).items():
        for k in range(1_000):
            before()
            fault = Fault(KeyboardInterrupt(), ("line",), k, FILES, once=True)
            try:
                with fault:
                    interrupted()
            except KeyboardInterrupt:
                pass
            left_open, has_stepped = step.is_open, not same(model.parameters(), weights)
            if left_open and (has_stepped or attempt(optimizer.step)[0] != "MisuseError"):
                wrong.append((name, fault.met, "open and not guarded"))
            step.abort()
            zeroed = not any(gradient.any() for gradient in model.gradients().values())
            now = {(kind, method): vars(kind).get(method) for kind, method in methods}
            ends = {
                "closed": not step.is_open and megapatch.train_step.open_step(model.chunks) is None,
                "methods": now == methods,
                "config": dict(vars(model.config)) == config,
                "no guard": not _guard._guards,
                "gradients": zeroed or has_stepped or name == "begin after a reduced step",
            }
            wrong += [(name, fault.met, end) for end, kept in ends.items() if not kept]
            for parameter, value in zip(model.chunks[0].parameters(), weights.values(), strict=True):
                parameter.data.copy_(value)
            if not fault.met:
                lines[name] = k
                break
    optimizer.load_state_dict(optimizer.state_dict())
    for each in (0, 1):
        with step:
            in_pieces(step, model, each, (2, 1), MEAN)
            step.finish()
        reference.train_step(each, num_microbatches=3, **MEAN)
    assert_same_parameters(model.parameters(), reference.parameters())
    return lines, wrong


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def found():
    return run_with_megatron(found_by, 1)[0]


def test_each_line_was_interrupted(found):
    lines, _ = found
    assert all(number > 20 for number in lines.values()), lines


def test_afterwards_all_is_as_before_or_as_after(found):
    _, wrong = found
    assert wrong == []
