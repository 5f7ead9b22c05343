"""slime's actor.py holds train() and save() by name: both ways of activating megapatch reach it."""

import importlib

import pytest
from rigs.megatron.options import BOTH, UNPATCHED
from rigs.slime.train import UTILS, SlimeLoop, find_slime

import megapatch
from megapatch._engine.engine import Engine
from megapatch._engine.settings import Settings
from megapatch._reporting.report import make_report
from megapatch.patches import PATCHES
from megapatch.testing import init_parallel, run_ranks, tiny_gpt

TARGETS = [f"{UTILS}.model:{name}" for name in ("train", "train_one_step", "save")]
HELD = {f"{UTILS}.actor:{name}" for name in ("train", "save")}


def imported_first(rank, world_size):
    """As with --custom-megatron-init-path megapatch.activate: the actor is imported, no model is built yet."""
    actor = importlib.import_module(f"{UTILS}.actor")
    engine = Engine(PATCHES, Settings())  # this process's own is switched off
    engine.activate()
    return rollouts(actor), told(make_report(engine.records))


def activated_first(rank, world_size):
    actor = importlib.import_module(f"{UTILS}.actor")
    return rollouts(actor), told(megapatch.report())


def rollouts(actor):
    init_parallel()
    loop = SlimeLoop(tiny_gpt(layers=4, hooks=False, **BOTH))
    for _ in range(2):
        loop.train(module=actor)
        loop.save(module=actor)
    return actor.train is loop.module.train and actor.save is loop.module.save


def told(report):
    (patch,) = (each for each in report.to_dict()["patches"] if each["name"] == "slime.train-reentry")
    (site,) = (each for each in patch["sites"] if each["module"] == f"{UTILS}.model")
    return site


@pytest.mark.parametrize(
    ("job", "env", "rebound"),
    [
        pytest.param(imported_first, UNPATCHED, HELD, id="imported before megapatch is activated"),
        pytest.param(activated_first, {}, set(), id="imported after"),
    ],
)
def test_the_actors_functions_are_the_patched_ones(job, env, rebound):
    for same, site in run_ranks(job, 2, env=env, setup=find_slime):
        assert same
        assert site["status"] == "applied"
        assert sorted(site["targets"]) == sorted(TARGETS)
        assert rebound <= set(site["rebound"])
        assert not site["out_of_reach"]
