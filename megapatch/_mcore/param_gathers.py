"""Gather the parameters that a distributed optimizer with overlap_param_gather left to the next forward pass.

Megatron's own flag, `param_gather_dispatched`, does not say whether that is due. finish_grad_sync() clears it
before the step, so between a backward pass and the step the parameters are whole although it is False. A gather
there that leaves it True is the last one: no forward pass gathers the shards of the step that follows. So a gather
may set the flag for good only if the optimizer is known to have stepped since the last gather. The patch
`megatron.gathered-when-read` records that, in STEPPED. Without it each read gathers, and the forward pass again.

The flag and STEPPED change in collectives over the data-parallel group and in the optimizer's step, which the
ranks of that group run, or skip, together. So all of them find the same groups to be gathered. A load is none of
these: one rank may load for all, and broadcast. So it is noted apart, in WHOLE, for readers that gather nothing.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import MisuseError
from .bucket_groups import MODULE, bucket_groups, groups_within
from .known import NN_MODULE, is_a
from .side_table import SideTable

OPTIMIZER_MODULE = "megatron.core.optimizer.distrib_optimizer"

STEPPED = SideTable()
"""Of a bucket group: whether its optimizer has stepped since its last gather; absent if not known."""
WHOLE = SideTable()
"""Of a bucket group: present if this rank, perhaps alone, has loaded all its parameters since that step."""
RECORDS = "_megapatch_records_steps"
"""Attribute of a function that replaces DistributedOptimizer.step_with_ready_grads(), and keeps STEPPED true."""

NOT_GATHERED = "the parameters of the last optimizer step are not gathered yet"
BY_HAND = "call ddp.disable_forward_pre_hook(), which gathers, and ddp.enable_forward_pre_hook() after the read"

_found: weakref.WeakSet[Any] = weakref.WeakSet()


def gather_params(ddps: Iterable[Any]) -> None:
    """Gather the pending bucket groups of these DistributedDataParallel chunks, and wait for gathers under way.

    A collective over the data-parallel group if, and only if, some bucket group has to be gathered.

    Raises:
        MisuseError: before any collective, if something is pending that cannot be gathered now.
    """
    due = [(ddp, group) for ddp in ddps for group in pending_groups(ddp)]
    for ddp, group in due:
        if reason := _why_not(ddp, group):
            raise MisuseError(f"{NOT_GATHERED}, and {reason}")
    _finish(group for _, group in due)


def refuse_stale_read(ddp: Any, reader: str) -> None:
    """Wait for gathers under way. Runs no collective: a reader that one rank alone may call would wait forever.

    Raises:
        MisuseError: the optimizer is known to have stepped since the last gather.
    """
    pending = (group for group in pending_groups(ddp) if group.param_gather_handle is None)
    if any(_has_stepped(group) and group not in WHOLE for group in pending):
        raise MisuseError(
            f"{NOT_GATHERED}, and {reader} cannot gather them, as one rank alone may call it: call "
            "megapatch.weight_sync.gathered_parameters(model) on all ranks before it"
        )
    finish_gathers(ddp)


def finish_gathers(ddp: Any) -> None:
    """Wait for gathers under way, such as those that a forward pass which raised has left. Runs no collective."""
    _finish(group for group in pending_groups(ddp) if group.param_gather_handle is not None)


def has_stepped(ddp: Any) -> bool:
    """Return whether the optimizer is known to have stepped since the last gather of some bucket group."""
    return any(_has_stepped(group) for group in pending_groups(ddp))


def pending_groups(ddp: Any) -> list[Any]:
    """Return the bucket groups with a gather under way, or that may hold parameters not gathered since a step."""
    if not ddp.ddp_config.overlap_param_gather:
        return []  # the step itself has gathered them
    return [
        group
        for group in bucket_groups(ddp)
        if group.param_gather_handle is not None
        or (not group.param_gather_dispatched and _has_stepped(group) is not False)
    ]


def record_gathered(group: Any) -> None:
    """Note that the parameters of a bucket group are gathered, or on their way, on all ranks."""
    STEPPED.set(group, False)


def record_loaded(ddp: Any, parameters: Iterable[Any]) -> None:
    """Note that this rank has loaded parameters: of a bucket group that has no others it may read them all.

    The pending gathers stay the same. Other ranks may not have loaded, and would wait in the gather.
    """
    for group in groups_within(pending_groups(ddp), parameters):
        WHOLE.set(group, True)


def record_step(ddp: Any) -> None:
    """Note that the optimizer has stepped, so that the next forward pass gathers in any case."""
    if ddp.ddp_config.overlap_param_gather:
        for group in bucket_groups(ddp):
            if group.param_gather_handle is None:  # else: overlap_param_gather_with_optimizer_step
                STEPPED.set(group, True)
                WHOLE.pop(group)
                group.param_gather_dispatched = False


def _has_stepped(group: Any) -> bool | None:
    """Return whether the optimizer has stepped since the last gather; None if nobody knows."""
    optimizer = getattr(sys.modules.get(OPTIMIZER_MODULE), "DistributedOptimizer", None)
    if not hasattr(getattr(optimizer, "step_with_ready_grads", None), RECORDS):
        return None  # the patch was not applied, or was taken back
    answer: bool | None = STEPPED.get(group)
    return answer


def _finish(groups: Iterable[Any]) -> None:
    import torch

    with torch.no_grad():
        for group in groups:
            lasting = group.param_gather_dispatched or bool(_has_stepped(group))
            group.finish_param_sync(skip_next_bucket_dispatch=True)
            group.param_gather_dispatched = lasting


def _why_not(ddp: Any, group: Any) -> str:
    """Return why a group's parameters cannot be gathered at this moment, and what to do; "" if they can."""
    config = ddp.ddp_config
    if getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False):
        return (
            "with reuse_grad_buf_for_mxfp8_param_ag they cannot be: the buffer to gather from is the gradients'. "
            "Read after a forward pass, or switch that option or overlap_param_gather off"
        )
    if not config.use_distributed_optimizer:
        return (
            "those of a layer-wise optimizer are gathered through the gradients' buffer, which may be in use. "
            f"After the optimizer step {BY_HAND}"
        )
    if any(bucket.param_data.untyped_storage().size() == 0 for bucket in group.buckets):
        return "their buffer is offloaded. Gather them before offloading, or load them first"
    return ""


def ddps_of(model: Any) -> list[Any]:
    """Return the DistributedDataParallel chunks of a model: itself, those inside, or the one around it.

    Args:
        model: a module, wrapped or not, or a list of such.

    Raises:
        MisuseError: for anything else, and for a model with a DistributedDataParallel that cannot be found.
    """
    found: dict[int, Any] = {}
    ddp_class = getattr(sys.modules.get(MODULE), "DistributedDataParallel", None)
    for module in _modules(model):
        if ddp_class is not None:
            inside = [part for part in module.modules() if isinstance(part, ddp_class)]
            found.update((id(ddp), ddp) for ddp in inside or _owners(module, ddp_class))
    return list(found.values())


def ddps_in(model: Any) -> list[Any]:
    """Return the same for an argument of upstream's, which may be anything: only modules are looked at."""
    parts = model if isinstance(model, list | tuple) else [model]
    return ddps_of([part for part in parts if is_a(part, NN_MODULE)])


def ddps_left(module: Any) -> list[Any]:
    """Return the same, or nothing for a model that can no longer be gathered."""
    try:
        return ddps_of(module)
    except MisuseError:
        return []  # of a model whose DistributedDataParallel is gone, and with it what could gather


def overlapping_ddps(module: Any) -> list[Any]:
    """Return those whose parameters are gathered in the forward pass."""
    return [ddp for ddp in ddps_left(module) if ddp.ddp_config.overlap_param_gather]


def _modules(model: Any) -> Iterator[Any]:
    if isinstance(model, list | tuple):
        for part in model:
            yield from _modules(part)
    elif callable(getattr(model, "modules", None)):
        yield model
    else:
        raise MisuseError(f"expected a model or a list of model chunks, got {type(model).__name__}")


def _owners(module: Any, ddp_class: type) -> list[Any]:
    """Return the DistributedDataParallel around a module that holds no reference to it."""
    # Megatron's buffers set main_grad (0.12 to 0.19). Megatron-FSDP, which gathers its parameters itself, sets
    # it, too, or makes it a property of all parameters (0.12, 0.13).
    managed = (
        parameter
        for parameter in module.parameters()
        if "main_grad" in vars(parameter) and not hasattr(parameter, "get_main_grad")
    )
    parameter = next(managed, None)
    if parameter is None:
        return []
    for look in (lambda: _found, lambda: _living(ddp_class)):
        for ddp in look():
            if parameter in ddp.param_to_bucket_group:
                return [ddp]
    raise MisuseError(
        "this model's parameters lie in the buffers of a DistributedDataParallel that cannot be found: pass the "
        "wrapped model chunks"
    )


def _living(ddp_class: type) -> list[Any]:
    """Look through all objects of the process: 0.1 s for a million, once for each model that comes unwrapped."""
    living = [thing for thing in gc.get_objects() if issubclass(type(thing), ddp_class)]
    _found.update(living)
    return living
