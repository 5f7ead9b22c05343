"""SkyRL's and slime's own patches of Megatron and torch, together with all of ours, in both orders.

Those of verl, ms-swift and ROLL are in the tests of their engines.
"""

import importlib
import importlib.util

import pytest
from rigs.collisions import together
from rigs.megatron.options import BOTH
from rigs.skyrl.releases import RELEASES, find_skyrl, needs_skyrl
from rigs.slime import train as slime

from megapatch.testing import init_parallel, run_ranks, tiny_gpt

STEPS = 3
SKYRL = "skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy"
SLIME = "slime.utils.reloadable_process_group", "slime.backends.megatron_utils.megatron_patch"


def trained():
    init_parallel()
    model = tiny_gpt(**BOTH)
    losses = [model.train_step(step).loss for step in range(STEPS)]
    model.gather_parameters()
    return losses, model.parameters()


def patch_as_skyrl():
    importlib.import_module(SKYRL)  # which patches


def patch_as_slime():
    groups, patches = SLIME
    module = importlib.import_module(groups)
    module.available_memory = lambda: {"free_GB": 100.0}  # it asks the GPU
    module.monkey_patch_torch_dist()
    if importlib.util.find_spec(patches):
        importlib.import_module(patches)


def beside(rank, world_size, theirs):
    return together(theirs, trained)


def check(ranks, who, at_least):
    for others, not_in_place, (alone, *both) in ranks:
        assert not_in_place == []
        assert len([target for module, target in others if module.startswith(f"{who}.")]) >= at_least
        for losses, parameters in both:
            assert losses == alone[0]
            assert all(value.equal(alone[1][name]) for name, value in parameters.items())


@needs_skyrl
def test_skyrls():
    release = [release for release in RELEASES if not release.old][-1]
    check(
        run_ranks(beside, 2, patch_as_skyrl, setup=find_skyrl, env={"SKYRL_RELEASE": release.folder}), "skyrl", 2
    )


@pytest.mark.skipif(not slime.CHECKOUT or slime.FRAMEWORK != "slime", reason="SLIME_CHECKOUT is not set")
def test_slimes():
    check(run_ranks(beside, 2, patch_as_slime, setup=slime.find_slime), "slime", 20)
