"""One rank loads for all, right after a step whose parameters are not gathered yet, at 2 ranks.

No rank enters a collective because of what it alone has done: each program ends as without megapatch.
"""

import itertools
import os
from functools import partial

import pytest
import torch
from rigs.cells import cells_of
from rigs.megatron.gathers import pair, wrong
from rigs.megatron.options import UNPATCHED, quick_writer

from megapatch._mcore.bucket_groups import finish_param_gathers
from megapatch.patches.megatron._around_train import finish_earlier_call
from megapatch.testing import init_parallel
from megapatch.weight_sync import gathered_parameters

MOMENTS = {"step": lambda model: None, "forward pass": lambda model: model.forward_backward(1, forward_only=True)}


def save(model, folder):
    from megatron.core import dist_checkpointing

    os.makedirs(folder, exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(model.chunks[0].sharded_state_dict(), folder)


READS = {
    "save": save,
    "state_dict": lambda model, folder: model.chunks[0].state_dict(),
    "gathered_parameters": lambda model, folder: gathered_parameters(model.chunks),
    "disable_forward_pre_hook": lambda model, folder: model.chunks[0].disable_forward_pre_hook(),
    "forward pass": lambda model, folder: model.forward_backward(2, forward_only=True),
    "step": lambda model, folder: model.train_step(2),
    "train(), called again": lambda model, folder: finish_earlier_call(model.chunks),
    "streaming.slime": lambda model, folder: finish_param_gathers(model.chunks[0]),
}


def one_rank_loads(rank, moment, read, folder):
    """Let rank 0 go back to the weights of before a step, and give them to all; read, and compare."""
    _, model = pair(dtype="bf16")
    (ddp,) = model.chunks
    saved = {name: value.clone() if torch.is_tensor(value) else value for name, value in ddp.state_dict().items()}
    before = model.parameters()
    model.train_step()
    MOMENTS[moment](model)
    if rank == 0:
        ddp.load_state_dict(saved)
    ddp.broadcast_params()
    model.optimizer.reload_model_params()
    READS[read](model, f"{folder}/{moment}, {read}")
    model.gather_parameters()
    return wrong(model.parameters(), before), model.parameters()


def job(rank, world_size, folder):
    init_parallel()
    quick_writer()
    for moment, read in itertools.product(MOMENTS, READS):
        yield (moment, read), partial(one_rank_loads, rank, moment, read, folder)


without = cells_of(job, 2, folder="without", env=UNPATCHED)
patched = cells_of(job, 2, folder="with")


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_all_ranks_have_what_one_has_loaded(without, patched, moment, read):
    for plain, found in zip(without, patched, strict=True):
        differing, parameters = found[moment, read]
        assert differing == 0 or read == "step"
        assert wrong(parameters, plain[moment, read][1]) == 0
