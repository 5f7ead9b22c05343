"""megatron.dropped-models-freed: models that were dropped, and what has to stay the same."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from rigs.diagnosed_code import GONE, of_a_rank, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.imported import run_with_megatron
from rigs.megatron.process_groups import SHARDED, cycles, experts
from rigs.megatron.save import minor

from megapatch.patches.megatron.dropped_models_freed import (
    ALL_TO_ALL,
    END,
    MANAGER,
    MODULE,
    OPTIMIZERS,
    SHARDS,
    diagnose,
    diagnose_shards,
    let_the_graph_go,
)

IN_0_12 = pytest.mark.skipif(minor() < 13, reason="experts are left as they are in 0.12: unsupported")
CYCLES = 4
WITHOUT = {"MEGAPATCH_DISABLE": "megatron.dropped-models-freed"}  # groups of models that are gone are destroyed
MODELS = {name: (experts(name), {"expert_model_parallel_size": 2}) for name in ("alltoall", "allgather")}
MODELS["dense, fp32"] = (SHARDED, {})


def dropped(rank, world_size, name):
    options, sizes = MODELS[name]
    return cycles(CYCLES, options, **sizes)


@pytest.mark.parametrize("name", [*(pytest.param(n, marks=IN_0_12) for n in list(MODELS)[:2]), "dense, fp32"])
@pytest.mark.quick
def test_models_that_were_dropped_are_freed_and_train_as_before(name):
    plain, patched = (run_with_megatron(dropped, 2, name, env=env) for env in (WITHOUT, None))
    for before, now in zip(plain, patched, strict=True):
        for one, other in zip(before, now, strict=True):
            assert (other.steps, other.weights) == (one.steps, one.weights)
            assert one.alive > other.alive == 0
        groups = [one.groups for one in before]
        assert groups == sorted({*groups})  # those of each layout stay
        assert len({one.groups for one in now}) == 1


def test_what_a_dispatcher_keeps_has_the_same_values_without_their_graph():
    """Its own, and those of the flexible dispatcher's manager."""
    probabilities = torch.ones(3, requires_grad=True) * 2
    manager = SimpleNamespace(token_probs=probabilities, name="manager")
    dispatcher = SimpleNamespace(
        probs=probabilities, parameter=torch.ones(1, requires_grad=True), **{MANAGER: manager}
    )
    before = dict(vars(dispatcher))
    assert let_the_graph_go(lambda self: self.probs)(dispatcher) is probabilities  # what is returned has its graph
    for kept in (dispatcher.probs, manager.token_probs):
        assert kept.equal(probabilities) and kept.grad_fn is None
    assert {name for name, value in vars(dispatcher).items() if value is not before[name]} == {"probs"}


def verdicts(rank, world_size):
    module = importlib.import_module(MODULE)

    def resets(self, hidden_states):
        self.probs = None

    def keeps_nothing(self, hidden_states, routing_map, probs): ...

    kind = getattr(module, ALL_TO_ALL)
    edits = {
        "resets": (kind, END, resets),
        "no probs": (kind, "dispatch_preprocess", keeps_nothing),
        "gone": (kind, END, GONE),
    }
    return verdicts_of(diagnose, module, edits)


@IN_0_12
def test_verdicts():
    expected = {
        "as it is": ("needed", "keeps probs"),
        "resets": ("fixed", "resets probs"),
        "no probs": ("fixed", "keeps no probs"),
        "gone": ("unknown", END),
    }
    assert_verdicts(of_a_rank(verdicts), expected)


def verdicts_of_shards(rank, world_size):
    module = importlib.import_module(OPTIMIZERS)

    def detaches(cls, parameter):
        return parameter.detach().view(-1), parameter.detach().view(-1)

    kind, name = module.DistributedOptimizer, SHARDS.rpartition(".")[2]
    edits = {"detaches": (kind, name, detaches), "gone": (kind, name, GONE)}
    return verdicts_of(diagnose_shards, module, edits)


def test_verdicts_of_shards():
    expected = {
        "as it is": ("needed", "views with a graph"),
        "detaches": ("fixed", "have no graph"),
        "gone": ("unknown", SHARDS),
    }
    assert_verdicts(of_a_rank(verdicts_of_shards), expected)
