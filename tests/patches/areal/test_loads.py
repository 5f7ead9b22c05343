"""AReaL's own checkpointer loads weights alone (with_optim=False), at 2 ranks: the next step starts from them.

Real: AReaL's MegatronCheckpointManager, Megatron's checkpoints on disk and optimizer.
"""

import importlib
import os

import pytest
import torch
from rigs.areal.engine import CHECKPOINTER, RELEASES, find_areal, needs_areal
from rigs.loads import KEPT, UNDONE, after_load
from rigs.megatron.options import UNPATCHED, quick_writer

pytestmark = needs_areal


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
    def save_and_load(trained, new):
        if rank == 0:
            os.makedirs(folder)
        torch.distributed.barrier()
        manager_of(trained).save_checkpoint(folder, with_optimizer=False, with_rng=False)
        manager_of(new).load_checkpoint(folder, with_optimizer=False, with_rng=False)

    quick_writer()
    return after_load(save_and_load)


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_a_step_at_rate_zero_leaves_the_loaded_weights(release, tmp_path):
    without, patched = (
        release.ranks_of("AREAL_RELEASE", loads, 2, f"{tmp_path}/{number}", setup=find_areal, env=env)
        for number, env in enumerate((UNPATCHED, {}))
    )
    assert without == [UNDONE] * 2
    assert patched == [KEPT] * 2
