"""While a step is open, its optimizer and its scheduler load nothing; its model does, for a reference."""

from __future__ import annotations

import copy

import pytest
import torch
from rigs.imported import run_with_megatron
from rigs.megatron.options import GRADS, attempt, linear_schedule
from rigs.train_step.models import MEAN, in_pieces

from megapatch.testing import init_parallel, tiny_gpt
from megapatch.train_step import TrainStep

OPTIONS = {"optimizer": "adam", "dtype": "bf16", "use_distributed_optimizer": True, "lr": 0.05}


def found_by(rank, world_size):
    init_parallel()
    model = tiny_gpt(**GRADS, **OPTIONS)
    scheduler = linear_schedule(model.optimizer, steps=10, max_lr=0.05)
    model.train_step(0)
    scheduler.step(1)
    children = getattr(model.optimizer, "chained_optimizers", [model.optimizer])
    parts = {"chain": model.optimizer, "optimizer": children[0], "scheduler": scheduler}
    states = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}

    def load():
        return {name: attempt(part.load_state_dict, states[name]) for name, part in parts.items()}

    model.train_step(1)
    scheduler.step(1)
    step = TrainStep(model.chunks, model.optimizer, scheduler)
    step.begin()
    before = copy.deepcopy([part.state_dict() for part in (children[0].optimizer, scheduler)])
    found = {"open": load()}
    after = copy.deepcopy([part.state_dict() for part in (children[0].optimizer, scheduler)])
    found["weights"] = attempt(model.chunks[0].load_state_dict, model.chunks[0].state_dict())[0]
    step.set_aside()
    found["aside"] = load()
    step.take_up()
    found["open again"] = load()
    del step
    found["dropped by its caller"] = load()
    with TrainStep(model.chunks, model.optimizer, scheduler) as step:
        in_pieces(step, model, 0, (2, 1), MEAN)
        step.finish(1)
    found["finished"] = load()
    left = ["load_state_dict" in vars(part) for part in parts.values()]
    return found, same(before, after), left


def same(one, other):
    if torch.is_tensor(one):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.fixture(scope="module")
def ranks():
    return run_with_megatron(found_by, 2)


def test_loads_into_an_open_step_are_refused_and_change_nothing(ranks):
    for found, unchanged, _ in ranks:
        for when in ("open", "open again"):
            for name, what in (("chain", "optimizer"), ("optimizer", "optimizer"), ("scheduler", "scheduler")):
                error, text = found[when][name]
                assert error == "MisuseError"
                assert text.startswith(f"load_state_dict() of the {what} while a TrainStep of its model is open: ")
                assert "Nothing was loaded; call the step's finish() or abort() first" in text
        assert unchanged


def test_other_loads_are_not(ranks):
    for found, _, left in ranks:
        assert found["weights"] is None
        for when in ("aside", "dropped by its caller", "finished"):
            assert [error for error, _ in found[when].values()] == [None] * 3, when
        assert left == [False] * 3
