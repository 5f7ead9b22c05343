"""slime's save(), with Megatron's own save_checkpoint(), writes the trained parameters between rollouts."""

import importlib

import pytest
from rigs.imported import run_with_megatron
from rigs.megatron.options import ADAM, BOTH, UNPATCHED, assert_same_parameters, plain_steps, quick_writer
from rigs.slime.train import CHECKOUT, SlimeLoop, find_slime

from megapatch.testing import init_parallel, tiny_gpt

pytestmark = pytest.mark.skipif(not CHECKOUT, reason="SLIME_CHECKOUT does not name a checkout of slime")


def saved_and_loaded(rank, world_size, folder):
    """Parameters as loaded from what was saved after two and after three steps."""
    init_parallel()
    checkpoints = {"save": folder, "load": folder, "ckpt_format": "torch_dist"}
    loop = SlimeLoop(tiny_gpt(layers=4, hooks=False, **BOTH), arguments=checkpoints)
    quick_writer()
    for steps in (2, 1):
        loop.train(steps)
        loop.save()
    checkpointing = importlib.import_module("megatron.training.checkpointing")
    found = {}
    for step in (2, 3):
        only = {"ckpt_step": step, "no_load_optim": True}
        fresh = SlimeLoop(tiny_gpt(layers=4, hooks=False, **BOTH), arguments={**checkpoints, **only})
        fresh._take_over()
        checkpointing.load_checkpoint(fresh.model.chunks, None, None)
        found[step] = fresh.model.parameters()
    return found


def test_a_checkpoint_holds_what_was_trained(tmp_path):
    by_rank = run_with_megatron(saved_and_loaded, 2, str(tmp_path), setup=find_slime)
    reference = run_with_megatron(plain_steps, 2, {}, ADAM, 3, env=UNPATCHED)
    for found, steps in zip(by_rank, reference, strict=True):
        for step, parameters in found.items():
            assert_same_parameters(parameters, steps[step - 1][1])
