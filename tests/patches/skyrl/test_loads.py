"""SkyRL's own load_checkpoint() of weights alone, and into a worker that has trained on, at 2 ranks.

Real: SkyRL's MegatronStrategy, Megatron's checkpoints on disk, optimizer and scheduler. Ray, Hugging Face and the
cloud are stand-ins.
"""

import contextlib
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from rigs.megatron.options import UNPATCHED, quick_writer
from rigs.skyrl.releases import needs_skyrl

from megapatch.patches.skyrl.pipeline_seed import MODULES
from megapatch.testing import init_parallel, tiny_gpt

pytestmark = needs_skyrl

OPTIONS = {"dtype": "bf16", "optimizer": "adam", "lr": 0.05, "use_distributed_optimizer": True}
SAVED = 3


def strategy_of(release):
    module = release.module_of(MODULES)
    strategy = object.__new__(module.MegatronStrategy)
    strategy.megatron_config = SimpleNamespace(
        async_dist_ckpt_save=False, async_dist_ckpt_strategy="mcore", dist_ckpt_optim_fully_reshardable=False
    )
    strategy.hf_config, strategy.is_lora = None, False
    strategy.get_rng_state, strategy.load_rng_state = dict, lambda state: None
    strategy.save_hf_configs = strategy.print = lambda *args, **kwargs: None
    strategy.is_rank_0 = lambda: False
    module.io = SimpleNamespace(
        exists=os.path.exists,
        makedirs=os.makedirs,
        is_cloud_path=lambda path: False,
        local_read_dir=contextlib.nullcontext,
        local_work_dir=contextlib.nullcontext,
    )
    module._async_calls, module.AsyncCallsQueue = mock.Mock(), mock.Mock()
    return strategy


def made():
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    model = tiny_gpt(**OPTIONS, optim={"min_lr": 0.0})
    schedule = {"init_lr": 0.0, "max_lr": 0.05, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 20}
    decay = {"lr_decay_style": "linear", "start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 20}
    return model, OptimizerParamScheduler(model.optimizer, **schedule, **decay, wd_incr_style="constant")


def train(model, scheduler, steps):
    for step in steps:
        model.train_step(step)
        scheduler.step(1)


def loads(rank, world_size, release, folder):
    init_parallel()
    quick_writer()
    strategy = strategy_of(release)
    model, scheduler = made()
    train(model, scheduler, range(SAVED))
    saved = model.parameters()
    if rank == 0:
        os.makedirs(folder)
    strategy.save_checkpoint(SimpleNamespace(actor_module=model.chunks), folder, rank, scheduler=scheduler)
    train(model, scheduler, range(SAVED, SAVED + 2))
    wrapper = SimpleNamespace(actor_module=model.chunks)
    at = []
    for _ in range(2):
        strategy.load_checkpoint(wrapper, folder, None, scheduler)
        at.append(scheduler.num_steps)
    new, _ = made()
    strategy.load_checkpoint(
        SimpleNamespace(actor_module=new.chunks), folder, new.optimizer, None, True, False, False
    )
    for group in new.optimizer.param_groups:
        group["lr"] = 0.0
    new.train_step(SAVED)
    found = new.parameters()
    return at, all(torch.equal(found[name], saved[name]) for name in saved)


@pytest.fixture(scope="module")
def without_and_with(release, tmp_path_factory):
    return [
        release.ranks(loads, 2, release, f"{tmp_path_factory.mktemp('loads')}/checkpoint", env=env)
        for env in (UNPATCHED, {})
    ]


def test_without_the_patches_weights_are_undone_and_steps_add_up(without_and_with):
    for at, unchanged in without_and_with[0]:
        assert at == [2 * SAVED + 2, 3 * SAVED + 2]
        assert not unchanged


def test_a_step_at_rate_zero_leaves_the_loaded_weights_and_the_schedule_is_the_saved_one(without_and_with):
    for at, unchanged in without_and_with[1]:
        assert at == [SAVED, SAVED]
        assert unchanged
