"""AReaL's own checkpointer loads weights alone (with_optim=False), at 2 ranks: the next step starts from them.

Real: AReaL's MegatronCheckpointManager, Megatron's checkpoints on disk and optimizer.
"""

from __future__ import annotations

import importlib
import os

import pytest
import torch
from rigs.areal.engine import CHECKPOINTER, RELEASES, find_areal, needs_areal
from rigs.megatron.options import UNPATCHED, quick_writer

from megapatch.testing import init_parallel, tiny_gpt

pytestmark = needs_areal

OPTIONS = {"dtype": "bf16", "optimizer": "adam", "use_distributed_optimizer": True}


def manager_of(model):
    manager = object.__new__(importlib.import_module(CHECKPOINTER).MegatronCheckpointManager)
    vars(manager).update(
        model=model.chunks,
        optimizer=model.optimizer,
        lr_scheduler=None,
        use_distributed_optimizer=True,
        use_checkpoint_opt_param_scheduler=False,
        use_dist_checkpointing=True,
        rank=torch.distributed.get_rank(),
        async_save=False,
        _async_queue=None,
    )
    return manager


def loads(rank, world_size, folder):
    init_parallel()
    quick_writer()
    model = tiny_gpt(**OPTIONS, lr=0.05)
    for step in range(3):
        model.train_step(step)
    saved = model.parameters()
    if rank == 0:
        os.makedirs(folder)
    torch.distributed.barrier()
    manager_of(model).save_checkpoint(folder, with_optimizer=False, with_rng=False)
    new = tiny_gpt(**OPTIONS, lr=0.0)
    manager_of(new).load_checkpoint(folder, with_optimizer=False, with_rng=False)
    loaded = new.parameters()
    new.train_step(3)
    found = new.parameters()
    return [all(torch.equal(state[name], saved[name]) for name in saved) for state in (loaded, found)]


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_a_step_at_rate_zero_leaves_the_loaded_weights(release, tmp_path):
    without, patched = (
        release.ranks_of("AREAL_RELEASE", loads, 2, f"{tmp_path}/{number}", setup=find_areal, env=env)
        for number, env in enumerate((UNPATCHED, {}))
    )
    assert without == [[True, False]] * 2
    assert patched == [[True, True]] * 2
