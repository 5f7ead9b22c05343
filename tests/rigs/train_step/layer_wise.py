"""The layer-wise optimizer over Adam, whose parameters are divided among the ranks as Muon's.

Muon itself needs a package that is not here.
"""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace

import torch

from megapatch.testing import tiny_gpt
from rigs.megatron.options import ADAM
from rigs.megatron.save import minor

ALL_GATHER = torch.distributed.all_gather
GATHERS_AHEAD = minor() >= 17  # else parameters are gathered in the step itself
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def layer_wise(**options):
    """Return a tiny GPT each parameter of which one rank steps."""
    module = importlib.import_module("megatron.core.optimizer.layer_wise_optimizer")
    groups = importlib.import_module("megatron.core.process_groups_config").ProcessGroupCollection
    options = {**ADAM, **OVERLAP, **options}
    model = tiny_gpt(**{**options, "optim": {**options["optim"], "overlap_param_gather": True}})
    more = {"model_chunks": model.chunks, "async_allgather": True}  # the latter in 0.17
    known = inspect.signature(module.LayerWiseDistributedOptimizer).parameters
    model.optimizer = module.LayerWiseDistributedOptimizer(
        model.optimizer.chained_optimizers,
        model.optimizer.config,
        groups.use_mpu_process_groups(),
        **{name: value for name, value in more.items() if name in known},
    )
    model.set_hooks()
    torch.distributed.all_gather = uneven_all_gather
    return model


def uneven_all_gather(parts, part, group=None, async_op=False):
    """What NCCL does with parts of other sizes, and gloo does not."""
    if len({each.numel() for each in parts}) == 1:
        return ALL_GATHER(parts, part, group=group, async_op=async_op)
    works = [
        torch.distributed.broadcast(each, torch.distributed.get_global_rank(group, rank), group, async_op=True)
        for rank, each in enumerate(parts)
        if each.numel()
    ]
    gather = SimpleNamespace(wait=lambda: [work.wait() for work in works])
    return gather if async_op else gather.wait()
