"""What slime.train-reentry says of slime's modules, as they are and changed."""

from __future__ import annotations

import importlib
from unittest import mock

from rigs.megatron.options import UNPATCHED
from rigs.slime.train import UTILS, find_slime

from megapatch.patches.slime.train_reentry import diagnose
from megapatch.testing import run_ranks


def another_train(rollout_id, chunks):
    """One that sets up overlap elsewhere, as slime#2066 would have it."""


def another_save(iteration, chunks): ...


def verdicts(rank, world_size):
    module = importlib.import_module(f"{UTILS}.model")
    found = {"as it is": diagnose(module)}
    changes = {"another train": ("train", another_train), "another save": ("save", another_save)}
    for case, (name, function) in changes.items():
        with mock.patch.object(module, name, function):
            found[case] = diagnose(module)
    for case, name in {"no train": "train", "no config": "get_model_config"}.items():
        with mock.patch.dict(vars(module)):
            delattr(module, name)
            found[case] = diagnose(module)
    return {case: (verdict.kind.value, verdict.reason) for case, verdict in found.items()}


def test_the_verdicts():
    patched, unpatched = (run_ranks(verdicts, 1, env=env, setup=find_slime) for env in ({}, UNPATCHED))
    assert patched == unpatched
    (found,) = patched
    assert found["as it is"] == (
        "needed",
        "train() asserts that config.no_sync_func must be None, and never clears the one it sets",
    )
    expected = {
        "another train": "parameter model of",
        "another save": f"disable_forward_pre_hook in {UTILS}.model:save",
        "no train": f"{UTILS}.model:train",
        "no config": f"{UTILS}.model.get_model_config",
    }
    for case, words in expected.items():
        kind, reason = found[case]
        assert kind == "unknown", case
        assert words in reason
