"""While a step is open, its optimizer and its scheduler load nothing; its model does, for a reference. Nobody else
steps the optimizer or zeroes gradients."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from rigs.imported import run_with_megatron
from rigs.megatron import options
from rigs.megatron.options import GRADS, attempt, linear_schedule
from rigs.megatron.save import minor
from rigs.releases import status_of
from rigs.train_step.models import MEAN, in_pieces

import megapatch
from megapatch.testing import init_parallel, tiny_gpt
from megapatch.testing._model import _gpt_of
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

    def load_otherwise():
        """As dist_checkpointing.load() does, which reads into tensors in place, and from moments in a file."""
        weights = _gpt_of(model.chunks[0]).sharded_state_dict()
        kind = {"metadata": {"distrib_optim_sharding_type": "dp_reshardable"}} if minor() >= 16 else {}
        names = [name for name in dir(type(children[0])) if name.startswith("load_parameter_state")]
        return {
            "sharded_state_dict": attempt(
                model.optimizer.sharded_state_dict, dict(weights), is_loading=True, **kind
            ),
            "of a child": attempt(children[0].sharded_state_dict, dict(weights), True, **kind),
            **{name: attempt(getattr(children[0], name), None) for name in names},
        }, attempt(model.optimizer.sharded_state_dict, dict(weights), **kind)[0]

    def methods():
        names = ("load_state_dict", "sharded_state_dict", "load_parameter_state")
        kinds = {kind for part in parts.values() for kind in type(part).__mro__}
        return {(kind, name): vars(kind).get(name) for kind in kinds for name in names}

    own = methods()
    model.train_step(1)
    scheduler.step(1)
    step = TrainStep(model.chunks, model.optimizer, scheduler)
    step.begin()
    before = copy.deepcopy([part.state_dict() for part in (children[0].optimizer, scheduler)])
    found = {"open": load()}
    found["otherwise"], found["save"] = load_otherwise()
    found["status"] = status_of("megatron.scheduler-after-load")
    found["restored"] = attempt(megapatch.restore, "megatron.scheduler-after-load")
    in_pieces(step, model, 1, (1,), MEAN)
    gradients = model.gradients()
    moves = {
        "step() of the optimizer": model.optimizer.step,
        "step_with_ready_grads() of the optimizer": children[0].step_with_ready_grads,
        "zero_grad() of the optimizer": model.optimizer.zero_grad,
        "zero_grad_buffer() of the model": model.chunks[0].zero_grad_buffer,
    }
    found["moves"] = {name: attempt(move) for name, move in moves.items()}
    found["kept"] = same(gradients, model.gradients())
    after = copy.deepcopy([part.state_dict() for part in (children[0].optimizer, scheduler)])
    found["copied"] = of_copies(scheduler, states["scheduler"])  # whose load writes the optimizer's rates
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
    other = tiny_gpt(**GRADS, **OPTIONS)
    steps = [TrainStep(other.chunks, other.optimizer), TrainStep(model.chunks, model.optimizer, scheduler)]
    for each in steps:
        each.begin()
    steps[0].abort()
    found["open beside another"] = load()
    steps[1].abort()
    return found, same(before, after), methods() == own


def of_copies(scheduler, state):
    """Return whether a copy of a scheduler loads into itself, and whether attributes are as they were saved."""
    other = copy.copy(scheduler)
    steps = scheduler.num_steps
    other.load_state_dict(dict(state, num_steps=steps + 3))
    pickle.dumps({name: value for name, value in vars(scheduler).items() if name != "optimizer"})
    return other.num_steps == steps + 3, scheduler.num_steps == steps


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
        for when in ("open", "open again", "open beside another"):
            for name, what in (("chain", "optimizer"), ("optimizer", "optimizer"), ("scheduler", "scheduler")):
                error, text = found[when][name]
                assert error == "MisuseError"
                assert text.startswith(f"load_state_dict() of the {what} while a TrainStep of its model is open: ")
                assert "This call has loaded nothing; call the step's finish() or abort() first" in text
        assert unchanged
        assert len(found["otherwise"]) >= 4
        assert {error for error, _ in found["otherwise"].values()} == {"MisuseError"}, found["otherwise"]


def test_an_open_step_owns_its_gradients(ranks):
    for found, *_ in ranks:
        for call, (error, text) in found["moves"].items():
            assert error == "MisuseError"
            assert text.startswith(f"{call} while a TrainStep of its model is open: the step owns its gradients")
            assert f"it is open since {__file__}:" in text
            assert f"this call is at {options.__file__}:" in text
        assert found["kept"]


def test_a_restore_meanwhile_names_the_step(ranks):
    for found, *_ in ranks:
        error, text = found["restored"]
        assert error == "RestoreError"
        assert f"the guard of a TrainStep, open since {__file__}:" in text


def test_nothing_is_set_on_the_objects(ranks):
    for found, _, own_methods in ranks:
        assert found["copied"] == (True, True)
        assert own_methods
        assert found["status"] == "applied"


def test_other_loads_are_not(ranks):
    for found, _, _ in ranks:
        assert found["weights"] is found["save"] is None
        for when in ("aside", "dropped by its caller", "finished"):
            assert [error for error, _ in found[when].values()] == [None] * 3, when
