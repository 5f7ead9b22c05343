"""gathered-when-read: nobody reads parameters that a step has left to be gathered.

Symptom   with overlap_param_gather a checkpoint or an export between an optimizer step and the next forward pass
          has this rank's shard of the parameters as they are, and all others as they were a step before.
Upstream  NVIDIA-NeMo/RL#4086.
Seam      start_param_sync() of the bucket groups; and what reads: state_dict() of any module,
          sharded_state_dict() of DistributedDataParallel, the exporters of Megatron-Bridge, mbridge and
          mcore-bridge, collectives over a parameter itself, by which exporters send or assemble it, and methods
          of AReaL and NeMo-RL that are known to copy the model.
Limits    a copy that is made tensor by tensor by anybody else, and only then sent, is not seen.
Cost      nothing to speak of in a step; a look through the module's parameters where one is read too early.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .._mcore.bucket_groups import bucket_groups
from ..patch import Patch
from ._findings import LEDGER, observes
from ._sites import site

_due: weakref.WeakSet[Any] = weakref.WeakSet()
"""Bucket groups whose parameters wait for a gather."""
_gathering: list[Any] = []
_reading: list[str] = []
"""The reader that is under way: what it calls for submodules is part of it."""
_COLLECTIVES = ("all_gather", "all_gather_into_tensor", "broadcast", "gather", "isend", "send")
CONVERSION = "megatron.bridge.models.conversion"


# ------------------------------------------------------------------------ what happens
@observes
def begin_step(ddps: Iterable[Any]) -> list[Any]:
    """Note, before a step, what it leaves to be gathered. Return the bucket groups that did not wait before."""
    groups = [group for ddp in ddps if ddp.ddp_config.overlap_param_gather for group in bucket_groups(ddp)]
    fresh = [group for group in groups if group not in _due]
    _due.update(fresh)
    return fresh


def forget(groups: Iterable[Any]) -> None:
    """Take back what `begin_step` noted, as the step was skipped."""
    _due.difference_update(groups)


def watch_gathers(start_param_sync: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start_param_sync)
    def patched_start_param_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        _gathering.append(self)
        try:
            result = start_param_sync(self, *args, **kwargs)
        finally:
            _gathering.pop()
        _note_gather(self)
        return result

    return patched_start_param_sync


@observes
def _note_gather(group: Any) -> None:
    _due.discard(group)


# ------------------------------------------------------------------------ who reads
def watch_module(reader: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reader)
    def patched_reader(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _due or _reading:
            return reader(self, *args, **kwargs)
        name = f"{type(self).__name__}.{reader.__name__}()"
        _note_read(name, _parameters([self]))
        _reading.append(name)
        try:
            return reader(self, *args, **kwargs)
        finally:
            _reading.pop()

    return patched_reader


def watch_reader(attribute: str, reader: Callable[..., Any]) -> Callable[..., Any]:
    """Watch a method that copies the model that its object has, tensor by tensor, which nothing else shows."""

    @functools.wraps(reader)
    def patched_reader(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _due:
            model = getattr(self, attribute, None)
            _note_read(f"{type(self).__name__}.{reader.__name__}()", _parameters([model]))
        return reader(self, *args, **kwargs)

    return patched_reader


def watch_stream(stream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stream)
    def patched_stream(*args: Any, **kwargs: Any) -> Any:
        return _watched(stream(*args, **kwargs), f"{stream.__name__}()", (*args, *kwargs.values()))

    return patched_stream


def _watched(tensors: Iterator[Any], reader: str, arguments: tuple[Any, ...]) -> Iterator[Any]:
    if _due:
        _note_read(reader, _parameters(arguments))
    return (yield from tensors)


def _parameters(arguments: Iterable[Any]) -> Iterator[Any]:
    """Return the parameters of the models among some arguments, and in lists among them."""
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            yield from _parameters(argument)
        elif callable(getattr(argument, "named_modules", None)):
            yield from argument.parameters()


def watch_collective(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def patched_collective(*args: Any, **kwargs: Any) -> Any:
        if _due and not _gathering:
            _note_sent(collective.__name__, (*args, *kwargs.values()))
        return collective(*args, **kwargs)

    return patched_collective


@observes
def _note_read(reader: str, parameters: Iterable[Any]) -> None:
    waiting = {id(parameter) for group in _due for parameter in group.params}
    count = sum(id(parameter) in waiting for parameter in parameters)
    if count:
        LEDGER.report(
            "gathered-when-read", reader, f"{reader} reads {count} parameters that wait for their gather"
        )


@observes
def _note_sent(collective: str, arguments: tuple[Any, ...]) -> None:
    from torch import Tensor

    sent = {argument.untyped_storage().data_ptr() for argument in arguments if isinstance(argument, Tensor)} - {0}
    if sent and any(
        parameter.untyped_storage().data_ptr() in sent for group in _due for parameter in group.params
    ):
        LEDGER.report(
            "gathered-when-read", collective, f"{collective}() sends a parameter that waits for its gather"
        )


PATCH = Patch(
    name="audit.gathers",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/RL/pull/4086",
    sites=(
        site("torch.distributed.distributed_c10d", dict.fromkeys(_COLLECTIVES, watch_collective)),
        site("torch.nn.modules.module", {"Module.state_dict": watch_module}),
        site(
            "megatron.core.distributed.param_and_grad_buffer",
            {"_ParamAndGradBucketGroup.start_param_sync": watch_gathers},
        ),
        site("megatron.core.transformer.module", {"MegatronModule.sharded_state_dict": watch_module}),
        site(
            f"{CONVERSION}.model_bridge",
            {"MegatronModelBridge.stream_weights_megatron_to_hf": watch_stream},
        ),
        site(
            "areal.engine.megatron_engine",
            {
                f"MegatronEngine.{name}": functools.partial(watch_reader, "model")
                for name in ("_update_weights_from_distributed", "_save_model_to_hf")
            },
        ),
        site(
            "nemo_rl.models.policy.workers.megatron_policy_worker",
            {"MegatronPolicyWorkerImpl.nccl_reshard_refit": functools.partial(watch_reader, "model")},
            since="MegatronPolicyWorkerImpl.nccl_reshard_refit",
        ),
        site("mbridge.core.bridge", {"Bridge.export_weights": watch_stream}),
        site("mcore_bridge.bridge.gpt_bridge", {"GPTBridge.export_weights": watch_stream}),
    ),
)
