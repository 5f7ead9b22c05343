"""megatron.finetune-for-one-load in Megatron's own load; for Bridge see test_fresh_train_state_of_bridge.py."""

from __future__ import annotations

import contextlib
import importlib
import sys
from argparse import Namespace

import pytest
from rigs.diagnosed_code import made_up, of_a_rank, seen_by, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.imported import run_with_megatron
from rigs.megatron.options import UNPATCHED, Interrupted, needs_training

from megapatch._verify.checks.loads import start_from_pretrained
from megapatch.patches.megatron._loads import source_in_bridge, source_in_megatron
from megapatch.patches.megatron.finetune_for_one_load import PATCH, noting, put_back, restore, restore_after_hook

pytestmark = needs_training
MEGATRON = PATCH.sites[0]


@pytest.mark.quick
def test_a_start_from_a_pretrained_checkpoint_leaves_the_setting():
    assert "for all later loads" in run_with_megatron(seen_by, 1, start_from_pretrained, env=UNPATCHED)[0]
    assert run_with_megatron(seen_by, 1, start_from_pretrained)[0] is None


def load(settings, folder, sets=None):
    """Go through a load from the folder, which sets the flag; return what the flag is in it and after it."""
    put_back(settings, folder)
    with contextlib.suppress(Interrupted), noting(settings, folder):
        found = settings.finetune
        settings.finetune = found if sets is None else sets
        raise Interrupted
    return found, settings.finetune


def test_the_flag_stays_until_the_next_load_from_the_same_folder():
    settings = Namespace(finetune=False)
    assert load(settings, "own", sets=True) == (False, True)
    assert load(settings, "reference") == (True, True)  # slime sets finetune and another folder around such a load
    assert load(settings, "own") == (False, False)
    assert load(settings, "own", sets=True) == (False, True)
    settings.finetune = 1
    assert load(settings, "own") == (1, 1)
    settings.finetune = True
    assert load(settings, "own") == (True, True)  # the user's own


class Slots:
    __slots__ = ("finetune",)


def test_a_load_whose_settings_or_folder_are_not_known_leaves_the_flag():
    settings, slots = Namespace(finetune=False), Slots()
    assert load(settings, None) == (False, False)
    assert load(settings, None, sets=True) == (False, True)
    assert load(settings, None) == (True, True)
    slots.finetune = False  # takes no weak reference
    assert load(slots, "own", sets=True) == (False, True)
    assert load(slots, "own") == (True, True)
    put_back(None, "own")
    with noting(None, "own"):
        pass


def test_a_hook_that_loads_a_base_model_leaves_the_setting_to_its_load_alone():
    """As Megatron-Bridge's hook does with PEFT, which sets the flag before it loads."""
    settings, found = Namespace(finetune=False, load="own"), []

    def create_hook(cfg, state):
        def hook(model):
            cfg.checkpoint.finetune = True
            return model

        return hook

    def load_checkpoint():
        found.append(settings.finetune)

    hook = restore_after_hook(create_hook)(Namespace(checkpoint=settings), state=None)
    assert (hook("model"), settings.finetune) == ("model", True)  # which setup() reads
    for _ in range(2):
        restore(lambda function: lambda args, kwargs: (settings, "own"), load_checkpoint)()
    assert found == [False, False]


def test_a_load_may_name_another_argument_for_its_folder(monkeypatch):
    settings = Namespace(load="own", pretrained_checkpoint="base")
    monkeypatch.setitem(sys.modules, "checkpointing", Namespace(get_args=lambda: settings))

    def load_checkpoint(ddp_model, load_arg="load"): ...

    load_checkpoint.__module__ = "checkpointing"
    read = source_in_megatron(load_checkpoint)
    assert read(([],), {}) == (settings, "own")
    assert read(([], "pretrained_checkpoint"), {}) == (settings, "base")
    assert read(([],), {"load_arg": "pretrained_checkpoint"}) == (settings, "base")
    monkeypatch.delattr(sys.modules["checkpointing"], "get_args")  # which raises before Megatron is initialized
    assert read(([],), {}) == (None, None)


def test_bridges_settings_are_those_of_its_state():
    def load_checkpoint(state, model): ...

    state = Namespace(cfg=Namespace(checkpoint=Namespace(load="own")))
    for args, kwargs in (((state, []), {}), ((), {"state": state, "model": []})):
        assert source_in_bridge(load_checkpoint)(args, kwargs) == (state.cfg.checkpoint, "own")
    assert source_in_bridge(load_checkpoint)((), {}) == (None, None)


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
        "sets_it_back": ("fixed", "as before after load_checkpoint()"),
    }
    assert_verdicts(of_a_rank(verdicts), expected)
