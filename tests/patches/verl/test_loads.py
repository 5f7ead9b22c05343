"""verl's own checkpoint manager loads weights alone (load_contents: [model]), at 2 ranks.

Real: MegatronCheckpointManager.load_checkpoint(), Megatron's model and optimizer. What Megatron reads is ours.
"""

from __future__ import annotations

import importlib
import sys
from unittest import mock

import pytest
import torch
from rigs.megatron.options import UNPATCHED
from rigs.verl.engine import RELEASES, needs_verl

from megapatch.testing import init_parallel, tiny_gpt

pytestmark = needs_verl

MODULE = "verl.utils.checkpoint.megatron_checkpoint_manager"
OPTIONS = {"dtype": "bf16", "optimizer": "adam", "use_distributed_optimizer": True}


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
    init_parallel()
    model = tiny_gpt(**OPTIONS, lr=0.05)
    for step in range(3):
        model.train_step(step)
    saved = model.parameters()
    new = tiny_gpt(**OPTIONS, lr=0.0)
    load(new, model.chunks[0].module.state_dict(), folder)
    loaded = new.parameters()
    new.train_step(3)
    found = new.parameters()
    return [all(torch.equal(state[name], saved[name]) for name in saved) for state in (loaded, found)]


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_a_step_at_rate_zero_leaves_the_loaded_weights(release, tmp_path):
    without, patched = (release.ranks(loads, 2, str(tmp_path), env=env) for env in (UNPATCHED, {}))
    assert without == [[True, False]] * 2
    assert patched == [[True, True]] * 2
