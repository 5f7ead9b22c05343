"""Gather the parameters that a distributed optimizer with overlap_param_gather left to the next forward pass.

Megatron's own flag, `param_gather_dispatched`, does not say whether that is due. finish_grad_sync() clears it
before the step, so between a backward pass and the step the parameters are whole although it is False. A gather
there that leaves it True is the last one: no forward pass gathers the shards of the step that follows. So a gather
may set the flag for good only if the optimizer is known to have stepped since the last gather. STEPPED records
that; where nobody sets it, each read gathers, and the forward pass gathers again.

The flag and STEPPED change in collectives over the data-parallel group and in the optimizer's step, which the
ranks of that group run, or skip, together. So all of them find the same groups to be gathered.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import MisuseError
from .bucket_groups import MODULE, bucket_groups

STEPPED = "_megapatch_stepped"
"""Attribute of a bucket group: whether its optimizer has stepped since its last gather; absent if not known."""

BY_HAND = "call ddp.disable_forward_pre_hook(), which gathers, and ddp.enable_forward_pre_hook() after the read"

_found: weakref.WeakSet[Any] = weakref.WeakSet()


def gather_params(ddps: Iterable[Any]) -> None:
    """Gather what is pending in these DistributedDataParallel chunks, and wait for gathers under way.

    A collective over the data-parallel group if, and only if, some bucket group has to be gathered.

    Raises:
        MisuseError: before any collective, if something is pending that cannot be gathered now.
    """
    due = [(ddp, group) for ddp in ddps for group in pending_groups(ddp)]
    for ddp, group in due:
        if reason := _why_not(ddp, group):
            raise MisuseError(f"the parameters of the last optimizer step are not gathered yet, and {reason}")
    if not due:
        return
    import torch

    with torch.no_grad():
        for _, group in due:
            lasting = group.param_gather_dispatched or getattr(group, STEPPED, False)
            group.finish_param_sync(skip_next_bucket_dispatch=True)
            group.param_gather_dispatched = lasting


def pending_groups(ddp: Any) -> list[Any]:
    """Return the bucket groups with a gather under way, or that may hold parameters not gathered since a step."""
    if not ddp.ddp_config.overlap_param_gather:
        return []  # the step itself has gathered them
    return [
        group
        for group in bucket_groups(ddp)
        if group.param_gather_handle is not None
        or (not group.param_gather_dispatched and getattr(group, STEPPED, True))
    ]


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
    # Megatron's buffers set main_grad (0.12 to 0.19). So does Megatron-FSDP, which gathers its parameters itself.
    managed = (
        parameter
        for parameter in module.parameters()
        if hasattr(parameter, "main_grad") and not hasattr(parameter, "get_main_grad")
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
