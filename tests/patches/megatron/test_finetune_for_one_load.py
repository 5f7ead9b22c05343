"""megatron.finetune-for-one-load in Megatron's own load; for Bridge see test_fresh_train_state_of_bridge.py."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
from rigs.diagnosed_code import made_up, of_a_rank, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.imported import run_with_megatron
from rigs.megatron.options import UNPATCHED, Interrupted, needs_training

from megapatch._verify.check import DefectSeen
from megapatch._verify.checks.loads import start_from_pretrained
from megapatch.patches.megatron.finetune_for_one_load import PATCH, _keeping

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


def test_a_setting_of_the_users_holds_in_each_load_and_after_it():
    found = []

    def load_checkpoint():
        found.append(settings.finetune)
        settings.finetune = "changed"
        raise Interrupted

    settings = SimpleNamespace(finetune=True)
    with pytest.raises(Interrupted):
        _keeping(settings, load_checkpoint)
    assert [*found, settings.finetune] == [True, True]


def verdicts(rank, world_size):
    module = importlib.import_module(MEGATRON.module)

    def sets_it_back(ddp_model, optimizer, opt_param_scheduler):
        args = get_args()  # noqa: F821
        args.finetune = True
        try:
            unwrap_model(ddp_model)  # noqa: F821
        finally:
            args.finetune = False

    return verdicts_of(MEGATRON.diagnose, module, made_up(module, "load_checkpoint", sets_it_back))


def test_verdicts():
    expected = {
        "as it is": ("needed", "sets finetune for all later loads"),
        "sets_it_back": ("fixed", "as before after load_checkpoint()"),
    }
    assert_verdicts(of_a_rank(verdicts), expected)
