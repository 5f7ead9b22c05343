"""megatron.finetune-for-one-load in Megatron's own load; for Bridge see test_fresh_train_state_of_bridge.py."""

from __future__ import annotations

import importlib

import pytest
from rigs.diagnosed_code import GONE, of_a_rank, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.imported import run_with_megatron
from rigs.megatron.options import UNPATCHED, needs_training

from megapatch._verify.check import DefectSeen
from megapatch._verify.checks.loads import start_from_pretrained
from megapatch.patches.megatron.finetune_for_one_load import PATCH

pytestmark = needs_training
MEGATRON = PATCH.sites[0]


def started(rank, world_size):
    """The text of the defect that a start from a pretrained checkpoint shows."""
    try:
        start_from_pretrained()
    except DefectSeen as seen:
        return str(seen)


@pytest.mark.quick
def test_a_start_from_a_pretrained_checkpoint_leaves_the_setting():
    assert "for all later loads" in run_with_megatron(started, 1, env=UNPATCHED)[0]
    assert run_with_megatron(started, 1)[0] is None


def verdicts(rank, world_size):
    module = importlib.import_module(MEGATRON.module)
    load = "load_checkpoint"

    def sets_it_back(ddp_model, optimizer, opt_param_scheduler):
        args = get_args()  # noqa: F821
        args.finetune = True
        try:
            unwrap_model(ddp_model)  # noqa: F821
        finally:
            args.finetune = False

    def sets_nothing(ddp_model, optimizer, opt_param_scheduler):
        unwrap_model(ddp_model)  # noqa: F821

    changes = {
        "repaired": (module, load, sets_it_back),
        "another": (module, load, sets_nothing),
        "gone": (module, load, GONE),
    }
    return verdicts_of(MEGATRON.diagnose, module, changes)


def test_verdicts():
    expected = {
        "as it is": ("needed", "sets finetune for all later loads"),
        "repaired": ("fixed", "as before after load_checkpoint()"),
        "another": ("unknown", "expected load_checkpoint() to set finetune"),
        "gone": ("unknown", "load_checkpoint"),
    }
    assert_verdicts(of_a_rank(verdicts), expected)
