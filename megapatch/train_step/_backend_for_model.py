"""The backends of a step, by the kind of its model: Megatron's DistributedDataParallel, or FSDP2's fully_shard."""

from __future__ import annotations

from typing import Any

from .._mcore import bucket_groups
from ..errors import MisuseError
from ._backend import Backend, Optimizer, Options, Scheduler


def backend_for(model: Any, optimizer: Optimizer, scheduler: Scheduler | None, options: Options) -> Backend:
    """Return the backend for this kind of model.

    Raises:
        MisuseError: there is none, or the options are not for it.
    """
    from . import _fsdp2, _fsdp2_module, _megatron

    if (chunks := bucket_groups.chunks_of(model)) is not None:
        return _megatron.MegatronBackend(chunks, optimizer, scheduler, options)
    if (chunks := _fsdp2_module.chunks_of(model)) is not None:
        return _fsdp2.FSDP2Backend(chunks, optimizer, scheduler, options)
    kinds = sorted({type(chunk).__name__ for chunk in (model if isinstance(model, (list, tuple)) else [model])})
    raise MisuseError(
        f"model is {', '.join(kinds) or 'an empty list'}; expected Megatron's DistributedDataParallel, a list of "
        "them, or a module with FSDP2's fully_shard applied"
    )
