"""verl's own checkpoint manager loads the optimizer with its schedule (load_contents: [optimizer]).

Real: MegatronCheckpointManager.load_checkpoint(), Megatron's model, optimizer, schedule and load(). The
checkpoint is ours.
"""

import importlib
from unittest import mock

import pytest
import torch
from rigs.loads import OPTIONS
from rigs.megatron.options import UNPATCHED, linear_schedule
from rigs.verl.engine import RELEASES, needs_verl
from rigs.verl.reads import load_checkpoint

from megapatch.testing import init_parallel, tiny_gpt

pytestmark = needs_verl

MODULE = "verl.utils.checkpoint.megatron_checkpoint_manager"


def load(model, read, folder, schedule):
    """Load what is read as verl does for load_contents: [optimizer]."""
    module = importlib.import_module(MODULE)
    manager = object.__new__(module.MegatronCheckpointManager)
    vars(manager).update(
        model=model.chunks,
        optimizer=model.optimizer,
        lr_scheduler=schedule,
        bridge=None,
        config=mock.MagicMock(),
        role="actor",
        peft_cls=None,
        rank=torch.distributed.get_rank(),
        use_checkpoint_opt_param_scheduler=schedule.use_checkpoint_opt_param_scheduler,
        use_dist_checkpointing=True,
        use_distributed_optimizer=True,
        use_megatron_fsdp=False,
        checkpoint_load_contents=["optimizer"],
    )
    load_checkpoint(manager, read, folder)


def schedules(rank, world_size, folder):
    """Return what a schedule has that was saved in the middle, at 5, by default, and with verl's option.

    Its steps, its rate as a part of its highest, and this, which was 1 when it was saved.
    """
    init_parallel()
    found = []
    for option in (False, True):
        model, new = (tiny_gpt(**OPTIONS, lr=rate, optim={"min_lr": 0.0}) for rate in (1.0, 0.5))
        verls = {"use_checkpoint_opt_param_scheduler": option, "override_opt_param_scheduler": not option}
        saved, loaded = (
            linear_schedule(each.optimizer, steps=10, max_lr=rate, **verls)
            for each, rate in ((model, 1.0), (new, 0.5))
        )
        saved.step(5)
        for each in (model, new):
            each.train_step(0)
        with mock.patch.object(new.optimizer, "sharded_state_dict", return_value={}):
            read = {"optimizer": model.optimizer.state_dict(), "lr_scheduler": saved.state_dict()}
            load(new, read, folder, loaded)
        rate = new.optimizer.param_groups[0]["lr"]
        found.append((loaded.num_steps, rate / loaded.max_lr, loaded.max_lr))
    return found


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_a_resumed_run_is_at_its_step_of_the_schedule(release, tmp_path):
    without, patched = (release.ranks(schedules, 1, str(tmp_path), env=env) for env in (UNPATCHED, {}))
    assert [steps for steps, _, _ in without[0]] == [0, 5]
    assert patched == [[(5, 0.5, 0.5), (5, 0.5, 1.0)]]
