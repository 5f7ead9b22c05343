"""Our own patches keep the contract, on the real code of the Megatron that is installed.

The scenarios of the patches of Megatron are those of `megapatch verify`, with a single rank.
"""

import argparse
import functools
import importlib
import logging
import random
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from rigs.contract import check_contract
from rigs.megatron.options import GRADS, quick_writer
from rigs.slime.actor import REFERENCE, Actor
from rigs.slime.train import IMITATIONS, SlimeLoop

from megapatch._python.layers import MARK
from megapatch._verify.checks import CHECKS, checkpoints, loads
from megapatch.patch import FIXED, NEEDED, Patch, Site, Verdict
from megapatch.patches import PATCHES
from megapatch.patches.megatron.finetune_for_one_load import put_back
from megapatch.testing import init_parallel, tiny_gpt


def plan_twice():
    """The writer of 0.12 does not work with every torch, so nothing is written."""
    quick_writer()
    checkpoints.structure_that_grows()


def two_rollouts():
    """Of the imitations of slime and miles."""
    init_parallel()
    loop = SlimeLoop(tiny_gpt(hooks=False, **GRADS))
    loop.train(1)
    loop.save()
    loop.train(1)


def sync_with_reference():
    """Of the imitation of slime."""
    init_parallel()
    pushed = Actor(tiny_gpt(layers=1)).update_weights()
    assert not any((tensor == REFERENCE).all() for tensor in pushed)


def resumed_at_step_3():
    """Of the imitation of slime."""
    module = importlib.import_module("slime.backends.megatron_utils.model")
    schedule = SimpleNamespace(num_steps=0)

    def step(increment):
        schedule.num_steps += increment

    def load(*args, **kwargs):
        schedule.num_steps = 24
        return 3, 0

    schedule.step = step
    made = ([SimpleNamespace()], None, schedule)
    with (
        mock.patch.object(module, "setup_model_and_optimizer", return_value=made),
        mock.patch.object(module, "load_checkpoint", load),
    ):
        module.initialize_model_and_optimizer(SimpleNamespace(global_batch_size=8))
    assert schedule.num_steps == 24


def start_with_peft():
    """Of the imitation of Bridge's setup, and of Megatron's load where wheels have it."""
    loads.start_from_pretrained()
    setup = importlib.import_module("megatron.bridge.training.setup")
    settings = argparse.Namespace(finetune=False, load="run", pretrained_checkpoint="")
    setup._create_peft_pre_wrap_hook(SimpleNamespace(checkpoint=settings), None)([])
    put_back(settings, "run")  # as the next load does as it begins
    assert not settings.finetune


SCENARIOS = {
    **{check.name: check.scenario for check in CHECKS},
    "megatron.finetune-for-one-load": start_with_peft,
    "megatron.save-plan-cache": plan_twice,
    "slime.first-sync-pushes-actor": sync_with_reference,
    "slime.schedule-after-load": resumed_at_step_3,
    "slime.train-reentry": two_rollouts,
}


@pytest.mark.every_patch("megatron", "slime")
def test_every_patch_keeps_the_contract(monkeypatch):
    monkeypatch.syspath_prepend(str(IMITATIONS))
    here = [patch for patch in PATCHES if patch.family in ("megatron", "slime")]
    check_contract({patch: SCENARIOS[patch.name] for patch in here}, verified={check.name for check in CHECKS})


# ------------------------------------------------------------------------------------ it finds mistakes
def draws(module):
    random.random()
    logging.getLogger("megatron").warning("training ends here")
    return Verdict(FIXED if MARK in vars(module.rgb_to_hsv) else NEEDED, "it sees its own repair")


def is_needed(module):
    return Verdict(NEEDED, "always")


def unwrapped_for_good(function):
    sys.modules["colorsys"].ONE_THIRD = 0.3
    return lambda *arguments: function(*arguments)


def dropping(function):
    @functools.wraps(function)
    def patched_ishex(text, **kwargs):
        return function(text)

    return patched_ishex


def does_nothing():
    pass


def is_hex():
    assert importlib.import_module("quopri").ishex(b"1")


def broken_patch(name, module, diagnose, **replace):
    return Patch(f"test.{name}", "It is broken.", None, (Site(module, diagnose, replace),))


def test_what_is_wrong_is_listed():
    broken = {
        broken_patch("careless", "colorsys", draws, rgb_to_hsv=unwrapped_for_good): does_nothing,
        broken_patch("dropping", "quopri", is_needed, ishex=dropping): is_hex,
    }
    with pytest.raises(AssertionError) as caught:
        check_contract(broken)
    for expected in (
        "test.careless: its diagnosis changes Python's random numbers",
        "test.careless: its diagnosis logs training ends here",
        "test.careless: once patched, its verdict is ",
        "test.careless: restore() leaves colorsys:ONE_THIRD changed",
        "test.careless: needed is True, and without the patch its scenario ends with None",
        "colorsys:rgb_to_hsv has another signature: (*arguments)",
        "colorsys:rgb_to_hsv has lost its name or docstring",
        "colorsys:rgb_to_hsv cannot be pickled by pickle",
        "test.dropping: ishex does not pass on an added keyword",
    ):
        assert expected in str(caught.value)
