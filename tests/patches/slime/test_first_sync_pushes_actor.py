"""The first weight sync pushes the actor's weights, with a reference model loaded after them."""

import importlib

import pytest
import torch
from rigs.cells import AUDITED, take_rules
from rigs.diagnosed_code import of_a_rank
from rigs.diagnosed_sources import verdict_of
from rigs.imported import run_with_megatron
from rigs.megatron.options import UNPATCHED
from rigs.slime.actor import REFERENCE, Actor
from rigs.slime.train import FRAMEWORK, UTILS, find_slime

from megapatch.patches.slime.first_sync_pushes_actor import diagnose
from megapatch.testing import init_parallel, tiny_gpt

CASES = {"reference": {}, "no reference": {"with_ref": False}, "offloaded": {"offload_train": True}}


def syncs(rank, world_size):
    """By case: whose weights were pushed at the first and the second sync, and the switches seen by then."""
    init_parallel()
    found = {}
    for case, options in CASES.items():
        model = tiny_gpt(layers=2)
        own = [param.detach().clone() for chunk in model.chunks for param in chunk.parameters()]
        actor = Actor(model, **options)
        seen = []
        for _ in range(2):
            if case != "offloaded":  # which reloads process groups first
                seen.append(whose(actor.update_weights(), own))
            else:
                seen.append(whose(list(model.chunks[0].parameters()), own))
        found[case] = (seen, list(actor.switches))
    # what the model holds after a forward pass of the reference was interrupted
    for name, offloads in (("interrupted, offloaded", True), ("interrupted", False)):
        actor.args.offload_train = offloads
        actor.actor._switch_model("ref")
        actor.switches.clear()
        found[name] = (whose(actor.update_weights(), own), list(actor.switches))
    return found


def audited(rank, world_size):
    """The rules that each case breaks."""
    init_parallel()
    found = {}
    for case, options in CASES.items():
        actor = Actor(tiny_gpt(layers=2), **options)
        if case != "offloaded":
            actor.update_weights()
        found[case] = take_rules()
    same = Actor(tiny_gpt(layers=2))
    same.actor._switch_model("actor")
    same.actor.weights_backuper.backup("ref")  # the reference is what the actor began with
    same.actor._switch_model("ref")
    same.update_weights()
    return {**found, "the same weights": take_rules()}


def whose(tensors, own):
    pairs = list(zip(tensors, own, strict=True))
    if all(torch.equal(tensor, param) for tensor, param in pairs):
        return "actor"
    return "reference" if all((tensor == REFERENCE).all() for tensor, _ in pairs) else "neither"


@pytest.mark.skipif(FRAMEWORK == "miles", reason="miles' actor takes other arguments, and needs no patch")
def test_the_actors_weights_are_pushed():
    (unpatched,) = run_with_megatron(syncs, 1, env=UNPATCHED, setup=find_slime)
    (patched,) = run_with_megatron(syncs, 1, setup=find_slime)
    same = {
        "no reference": (["actor", "actor"], []),
        "offloaded": (["actor", "actor"], ["actor"]),
        # A switch would write to memory that is paused there; slime itself switches before it trains.
        "interrupted, offloaded": ("reference", []),
    }
    wrong = {"reference": (["reference", "reference"], []), "interrupted": ("reference", [])}
    right = {"reference": (["actor", "actor"], ["actor"]), "interrupted": ("actor", ["actor"])}
    assert unpatched == {**same, **wrong}
    assert patched == {**same, **right}


@pytest.mark.skipif(FRAMEWORK == "miles", reason="miles' actor takes other arguments, and needs no patch")
def test_the_audit_finds_that_another_models_weights_are_sent():
    for env, broken in ((UNPATCHED, ["weights-synced"]), ({}, [])):
        (found,) = run_with_megatron(audited, 1, env={**env, **AUDITED}, setup=find_slime)
        assert found == {"reference": broken, "no reference": [], "offloaded": [], "the same weights": []}


def init_that_switches(self, args, with_ref):
    if with_ref:
        self.load_other_checkpoint("ref", args.ref_load)
    if args.vocab_size is None:
        args.vocab_size = 1
    self._switch_model("actor")
    if args.offload_train:
        self.sleep()


def init_that_switches_too_early(self, args, with_ref):
    self._switch_model("actor")
    if with_ref:
        self.load_other_checkpoint("ref", args.ref_load)


def init_that_loads_nothing(self, args, with_ref):
    self._switch_model("actor")


def switch_otherwise(self, tag):
    self._active_model_tag = self.weights_backuper.restore(tag)


def verdicts(rank, world_size):
    module = importlib.import_module(f"{UTILS}.actor")
    actor = module.MegatronTrainRayActor
    found = {"as it is": verdict_of(diagnose, module)}

    def with_methods(name, **methods):
        module.MegatronTrainRayActor = type(actor.__name__, (actor,), methods)
        found[name] = verdict_of(diagnose, module)

    with_methods("switches", init=init_that_switches)
    with_methods("too early", init=init_that_switches_too_early)
    with_methods("loads nothing", init=init_that_loads_nothing)
    with_methods("switches otherwise", _switch_model=switch_otherwise)
    module.MegatronTrainRayActor = actor
    return {case: (verdict.kind.value, verdict.reason) for case, verdict in found.items()}


def test_the_verdicts():
    found = of_a_rank(verdicts, setup=find_slime)
    kinds = {case: kind for case, (kind, _) in found.items()}
    assert kinds == {
        "as it is": "fixed" if FRAMEWORK == "miles" else "needed",
        "switches": "fixed",
        "too early": "needed",
        "loads nothing": "unknown",
        "switches otherwise": "unknown",
    }
