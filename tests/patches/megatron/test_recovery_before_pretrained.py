"""megatron.recovery-before-pretrained in Megatron; for Bridge see test_fresh_train_state_of_bridge.py."""

from __future__ import annotations

import importlib
from argparse import Namespace

import pytest
from rigs.diagnosed_code import made_up, of_a_rank, seen_by, verdicts_of
from rigs.diagnosed_sources import NOTHING, assert_verdicts, each_source
from rigs.imported import run_with_megatron
from rigs.megatron.options import UNPATCHED, needs_training

from megapatch._verify.checks.loads import start_from_recovery
from megapatch.patches.megatron.recovery_before_pretrained import (
    PATCH,
    count_recovery,
    diagnose_setup,
    note_source,
)

MEGATRON = PATCH.sites[0]


@needs_training
@pytest.mark.quick
def test_a_checkpoint_for_recovery_counts():
    assert "and not from its own" in run_with_megatron(seen_by, 1, start_from_recovery, env=UNPATCHED)[0]
    assert run_with_megatron(seen_by, 1, start_from_recovery)[0] is None


OWN, RECOVERS, BASE = "own", "own/non_persistent", "base"


@pytest.mark.parametrize(
    ("there", "settings", "asked", "expected"),
    [
        ({RECOVERS}, {}, OWN, True),
        ({RECOVERS}, {}, BASE, False),
        ({RECOVERS}, {"non_persistent_ckpt_type": "local"}, OWN, False),
        ({OWN}, {}, OWN, True),
        (set(), {}, OWN, False),
        ({"elsewhere"}, {"non_persistent_global_ckpt_dir": "elsewhere"}, OWN, True),
        ({RECOVERS}, {"non_persistent_global_ckpt_dir": "elsewhere"}, OWN, False),
        ({RECOVERS}, {"load": None}, None, False),
        ({RECOVERS}, None, OWN, False),
    ],
)
def test_only_the_folder_of_a_load_has_one_for_recovery(there, settings, asked, expected):
    exists = count_recovery(lambda folder: folder in there)
    usual = {"load": OWN, "non_persistent_ckpt_type": "global", "non_persistent_global_ckpt_dir": None}
    source = (None, None) if settings is None else (Namespace(**usual | settings), (usual | settings)["load"])
    load = note_source(lambda function: lambda args, kwargs: source, exists)
    assert load(asked) is expected
    assert exists(asked) is (asked in there)  # no load is under way


def verdicts(rank, world_size):
    module = importlib.import_module(MEGATRON.module)

    def looks_for_it(ddp_model, optimizer, opt_param_scheduler):
        args = get_args()  # noqa: F821
        if not checkpoint_exists(args.load) and not checkpoint_exists(args.non_persistent_global_ckpt_dir):  # noqa: F821
            args.finetune = True
        unwrap_model(ddp_model)  # noqa: F821

    return verdicts_of(MEGATRON.diagnose, module, made_up(module, "load_checkpoint", looks_for_it))


@needs_training
def test_verdicts():
    expected = {
        "looks_for_it": ("fixed", "takes a checkpoint for recovery"),
    }
    assert_verdicts(of_a_rank(verdicts), expected)


SETS_UP = """
def setup(state): return checkpoint_exists(state.cfg.checkpoint.load)
def checkpoint_exists(path): ...
"""
SOURCES = {
    diagnose_setup: {
        "it asks for a checkpoint": (SETS_UP, "needed", "looks for no checkpoint for recovery"),
        "it asks for both": (SETS_UP + "_has_global_non_persistent_checkpoint = None", "fixed", "looks for a"),
        "it asks for another thing": (
            SETS_UP.replace("return checkpoint", "return path"),
            "unknown",
            "checkpoint_exists",
        ),
        "there is nothing": (NOTHING, "unknown", "setup"),
    }
}
test_verdicts_on_setup = each_source(SOURCES)
