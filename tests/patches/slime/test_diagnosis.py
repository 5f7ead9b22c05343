"""Verdicts of slime.train-reentry on slime's modules, as they are and changed."""

import importlib

from rigs.diagnosed_code import GONE, of_a_rank, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.megatron.options import UNPATCHED
from rigs.renames import assert_renames_are_seen
from rigs.slime.train import UTILS, find_slime

from megapatch.patches.slime.train_reentry import diagnose


def another_train(rollout_id, chunks):
    """One that sets up overlap elsewhere, as slime#2066 would have it."""


def another_save(iteration, chunks): ...


def verdicts(rank, world_size):
    module = importlib.import_module(f"{UTILS}.model")
    changes = {
        "another train": (module, "train", another_train),
        "another save": (module, "save", another_save),
        "no train": (module, "train", GONE),
        "no config": (module, "get_model_config", GONE),
    }
    return verdicts_of(diagnose, module, changes)


def test_the_verdicts():
    found = of_a_rank(verdicts, setup=find_slime)
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
    unknown = {case: ("unknown", text) for case, text in expected.items()}
    assert_verdicts({case: found[case] for case in unknown}, unknown)


def test_a_renamed_name_is_not_taken_for_a_repair():
    assert_renames_are_seen("slime", at_least=20, setup=find_slime, env=UNPATCHED)
