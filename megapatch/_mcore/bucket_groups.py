"""Bucket groups of Megatron's DistributedDataParallel: unfinished gathers and reduces.

With overlap_param_gather the optimizer steps each rank's shard of the parameters and leaves gathering them to
the next forward pass. Until then the bucket group says so: `param_gather_dispatched` is False from the moment
its gradients are reduced, and `param_gather_handle` is set while the gather is under way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from .side_table import SideTable

MODULE = "megatron.core.distributed.distributed_data_parallel"
DDP = f"{MODULE}:DistributedDataParallel"
GROUP = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"

LINES = SideTable()
"""By bucket group: where its turn to be reduced is decided, if that patch is in place."""


def chunks_of(model: Any) -> list[Any] | None:
    """Return the chunks of a model of Megatron's DistributedDataParallel, given one or a list; None for others."""
    ddp = getattr(sys.modules.get(MODULE), "DistributedDataParallel", None)
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    return chunks if ddp is not None and chunks and all(isinstance(chunk, ddp) for chunk in chunks) else None


def bucket_groups(ddp: Any) -> list[Any]:
    """Return all bucket groups of one DistributedDataParallel chunk, dense and expert."""
    return [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]


def groups_within(groups: Iterable[Any], parameters: Iterable[Any]) -> list[Any]:
    """Return the bucket groups whose parameters are all among these."""
    these = {id(parameter) for parameter in parameters}
    return [group for group in groups if these.issuperset(map(id, group.params))]


def gathers_on_demand(ddp: Any) -> bool:
    """Return whether the parameters of this chunk can be gathered at any time.

    Not without overlap_param_gather (the optimizer has gathered them), and never with
    reuse_grad_buf_for_mxfp8_param_ag: there the parameter buffer is the gradient buffer, and gathering from it
    would overwrite the parameters with leftovers of the gradients.
    """
    config = ddp.ddp_config
    return bool(config.overlap_param_gather) and not getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False)


def has_ungathered_params(ddp: Any) -> bool:
    """Return whether some bucket group has not finished (or not begun) its gather since the last step."""
    return any(
        group.param_gather_handle is not None or not group.param_gather_dispatched for group in bucket_groups(ddp)
    )


def finish_param_gathers(ddp: Any) -> None:
    """Bring the parameters of one chunk in sync, with Megatron's own methods and no more gathers than needed.

    Waits for a gather under way, runs one not dispatched since the last step, leaves a finished one alone.
    Runs a collective over the data-parallel group where something is left to do: call it on all ranks.
    """
    if not gathers_on_demand(ddp):
        return
    import torch

    with torch.no_grad():
        for group in bucket_groups(ddp):
            group.finish_param_sync(skip_next_bucket_dispatch=True)


def gather_in_next_forward(ddp: Any) -> None:
    """Leave ungathered parameters to the next forward pass, which gathers them in its pre-hooks.

    Runs no collective. An interrupted step may have left the hooks off, and a forward pass outside of training
    would run on old parameters.
    """
    hooked = ddp.remove_forward_pre_hook_handles or not ddp.use_forward_hook
    if not hooked and gathers_on_demand(ddp) and has_ungathered_params(ddp):
        ddp.enable_forward_pre_hook()


def begin_lines(ddp: Any) -> None:
    """Begin a step in the lines that megatron.parameters-without-gradients has its bucket groups stand in."""
    for line in lines_of(ddp):
        line.begin()


def lines_of(ddp: Any) -> list[Any]:
    found = [LINES.get(group) for group in bucket_groups(ddp)]
    return list(dict.fromkeys(line for line in found if line is not None))


def settle_grad_reduces(ddp: Any) -> None:
    """Wait for gradient reduces that an interrupted backward pass left under way, and forget them.

    A later step would take the old handle for its own and never reduce its gradients. With several instances of
    the distributed optimizer there is no handle, but a stream in which the reduces are.
    """
    import torch

    groups = bucket_groups(ddp)
    for stream in {getattr(group, "communication_stream", None) for group in groups} - {None}:
        torch.cuda.current_stream().wait_stream(stream)
    for group in groups:
        if group.grad_reduce_handle is not None:
            group.grad_reduce_handle.wait()
            group.grad_reduce_handle = None


def forget_first_step(ddp: Any, if_partly_seen: bool = False) -> None:
    """Drop the gradient-ready counts of a first step, so that bucket groups learn again (Megatron 0.16 and later).

    Megatron learns from its first step how often each gradient becomes ready. One that was cut short would teach
    it the wrong number, or trip its assertion that every parameter was seen; without assertions, it would learn to
    reduce without the others.

    Args:
        if_partly_seen: only of groups that have not seen all their parameters.
    """
    for group in bucket_groups(ddp):
        if not getattr(group, "is_first_batch", False):
            continue
        if not if_partly_seen or len(group.per_param_grad_ready_counts) < len(group.params):
            group.per_param_grad_ready_counts = {}
