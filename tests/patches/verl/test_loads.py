"""verl's own checkpoint manager loads weights alone (load_contents: [model]), at 2 ranks.

Real: MegatronCheckpointManager.load_checkpoint(), Megatron's model and optimizer. What Megatron reads is ours.
"""

from __future__ import annotations

import importlib
import sys
from unittest import mock

import pytest
import torch
from rigs.loads import KEPT, UNDONE, after_load
from rigs.megatron.options import UNPATCHED
from rigs.verl.engine import RELEASES, needs_verl

pytestmark = needs_verl

MODULE = "verl.utils.checkpoint.megatron_checkpoint_manager"


def load(model, state, folder):
    """Load a state of the model as verl does for load_contents: [model]."""
    module = importlib.import_module(MODULE)
    manager = object.__new__(module.MegatronCheckpointManager)
    vars(manager).update(
        model=model.chunks,
        optimizer=model.optimizer,
        lr_scheduler=None,
        bridge=None,
        config=mock.MagicMock(),
        role="actor",
        peft_cls=None,
        rank=torch.distributed.get_rank(),
        use_checkpoint_opt_param_scheduler=False,
        use_dist_checkpointing=True,
        use_distributed_optimizer=True,
        use_megatron_fsdp=False,
        checkpoint_load_contents=["model"],
    )
    checkpointing = importlib.import_module("megatron.core.dist_checkpointing")
    with (
        mock.patch.object(module, "load_dist_checkpointing", return_value={"model": state}),
        mock.patch.object(checkpointing, "load_content_metadata", return_value={}, create=True),
        mock.patch.object(torch.serialization, "add_safe_globals"),
        mock.patch.dict(sys.modules, transformer_engine=mock.MagicMock()),  # 0.6.1 names its optimizer
    ):
        manager.load_checkpoint(folder)


def loads(rank, world_size, folder):
    return after_load(lambda trained, new: load(new, trained.chunks[0].module.state_dict(), folder))


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_a_step_at_rate_zero_leaves_the_loaded_weights(release, tmp_path):
    without, patched = (release.ranks(loads, 2, str(tmp_path), env=env) for env in (UNPATCHED, {}))
    assert without == [UNDONE] * 2
    assert patched == [KEPT] * 2
