"""megatron.asked-step-loaded in Megatron itself; for Bridge see test_fresh_train_state_of_bridge.py."""

from __future__ import annotations

import argparse
import importlib

import pytest
from rigs.diagnosed_code import made_up, of_a_rank, seen_by, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.imported import run_with_megatron
from rigs.megatron.options import UNPATCHED, needs_training

from megapatch._verify.checks.loads import newer_recovery
from megapatch.patches.megatron.asked_step_loaded import PATCH, find_asked_step, note_step

pytestmark = needs_training
MEGATRON = PATCH.sites[0]


@pytest.mark.quick
def test_the_step_that_is_asked_for_is_loaded():
    assert (
        run_with_megatron(seen_by, 1, newer_recovery, env=UNPATCHED)[0]
        == "step 2 is asked for, and step 4 is loaded"
    )
    assert run_with_megatron(seen_by, 1, newer_recovery)[0] is None


def found(rank, world_size, folder, cases):
    """Return which step a load finds for recovery, of each step that is asked for; None asks for the latest."""
    checkpointing, steps = importlib.import_module(MEGATRON.module), {}
    checkpointing._load_non_persistent_base_checkpoint = lambda *args, **kwargs: args[4]
    checkpointing.get_checkpoint_name = lambda *args, **kwargs: pytest.fail("persistent")
    (folder / "non_persistent").mkdir()
    (folder / "non_persistent/latest_checkpointed_iteration.txt").write_text("4")
    for asked in cases:
        settings = argparse.Namespace(
            ckpt_step=asked, non_persistent_ckpt_type="global", non_persistent_global_ckpt_dir=None
        )
        try:
            steps[asked] = checkpointing._load_base_checkpoint(str(folder), settings)
        except pytest.fail.Exception:
            steps[asked] = "persistent"
    return steps


def test_other_loads_find_what_is_there(tmp_path):
    expected = {None: 4, 0: 4, 4: 4, 1: "persistent", 2: "persistent", 6: "persistent"}
    assert run_with_megatron(found, 1, tmp_path, list(expected)) == [expected]


def test_a_load_that_ignores_the_step_finds_what_is_there():
    """As Megatron-Bridge's load of a base model, whose ckpt_step is that of its adapters."""
    find = find_asked_step(lambda: 4)
    load = note_step("settings", lambda settings, ignore_ckpt_step=False: find())
    settings = argparse.Namespace(ckpt_step=2)
    assert (load(settings, ignore_ckpt_step=True), load(settings), find()) == (4, -1, 4)


def verdicts(rank, world_size):
    module = importlib.import_module(MEGATRON.module)

    def obeys(load_dir, args):
        if not args.ckpt_step and _get_non_persistent_iteration(load_dir, args) != -1:  # noqa: F821
            return _load_non_persistent_base_checkpoint(load_dir)  # noqa: F821
        return get_checkpoint_name(load_dir, args.ckpt_step)  # noqa: F821

    def chooses_otherwise(load_dir, args):
        return load_dir

    return verdicts_of(
        MEGATRON.diagnose, module, made_up(module, "_load_base_checkpoint", obeys, chooses_otherwise)
    )


def test_verdicts():
    expected = {
        "obeys": ("fixed", "takes the step"),
        "chooses_otherwise": ("unknown", "choose a checkpoint"),
    }
    assert_verdicts(of_a_rank(verdicts), expected)
