"""An asynchronous save by a persistent worker writes tensors on the CPU as they were when it began.

Symptom   a checkpoint has some tensors of a later step, silently: those on the CPU, such as step counts and the
          state of an offloaded optimizer, of which up to 38% of the moments differed. Training had gone on while
          the worker wrote.
Upstream  NVIDIA/nvidia-resiliency-ext#376 (merged); in its 0.4 to 0.6, and in Megatron 0.12 to 0.19. A queue
          moves tensors to shared memory, and `.to("cpu")` in the worker copies only those that are on a GPU.
Seam      PersistentAsyncCaller.schedule_async_call(): the request that goes to the worker has copies of the
          tensors on the CPU. The caller's own request has the originals.
Limits    tensors in shared memory are handed over as they are: resiliency-ext reuses its own for all saves. So is
          a tensor that a save from before the patch was applied has moved there.
Numbers   change in checkpoints, to those of the step that is saved.
Cost      a copy of the tensors on the CPU as a save begins, and their memory until it is written.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...patch import FIXED, NEEDED, Patch, Site, Verdict
from .._diagnosis import Idle, StandIn, expect_none, running, torch_stand_in, unmet, with_globals

CALLER, SCHEDULE, REQUEST = "PersistentAsyncCaller", "schedule_async_call", "AsyncRequest"
QUEUES = ("queue", "_persistent_queue")
"""The queue to the worker: from 0.17 on Megatron has one for all callers."""


def diagnose(module: ModuleType) -> Verdict:
    """Run the real function on a stand-in, and look at the request that it hands over."""
    expect_none(*(f"{module.__name__}:{name}" for name in (CALLER, REQUEST) if not hasattr(module, name)))
    expect_none(*unmet.attributes(f"{module.__name__}:{CALLER}", SCHEDULE))
    put: list[Any] = []
    tensor = sys.modules["torch"].zeros(1)
    schedule = getattr(getattr(module, CALLER), SCHEDULE)
    stand_in = torch_stand_in(distributed=StandIn(get_rank=lambda: 0))
    with running(f"{SCHEDULE}()"):
        request = getattr(module, REQUEST)(len, (), [], preload_fn=functools.partial(len, [tensor]))
        with_globals(schedule, torch=stand_in)(caller_of(put.append), request)
        ((found,),) = [each.preload_fn.args[0] for each in put]
        is_shared = found.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    if is_shared:
        return Verdict(NEEDED, "a persistent worker shares the memory of tensors on the CPU with the trainer")
    return Verdict(FIXED, "a persistent worker gets copies of tensors on the CPU")


def caller_of(put: Callable[[Any], Any]) -> StandIn:
    """Return just enough of a caller to hand over requests by `put`."""
    queue = StandIn(put=put, join=Idle())
    return StandIn(
        process=Idle(), rank=0, preload_q=Idle(), _persistent_preload_q=Idle(), **dict.fromkeys(QUEUES, queue)
    )


def hand_over_copies(schedule_async_call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(schedule_async_call)
    def patched_schedule_async_call(self: Any, async_req: Any, *args: Any, **kwargs: Any) -> Any:
        request = async_req
        if isinstance(async_req, tuple):
            copies: dict[int, Any] = {}
            parts = {name: _copied(getattr(request, name), copies) for name in ("async_fn_args", "preload_fn")}
            request = request._replace(**parts)
        return schedule_async_call(self, request, *args, **kwargs)

    return patched_schedule_async_call


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """Return the arguments with copies of their tensors on the CPU, one of each, whose memory nobody shares."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.is_shared():
            return value
        if id(value) not in copies:
            copies[id(value)] = value.detach().clone()
        return copies[id(value)]
    if type(value) in (list, tuple):
        return type(value)(_copied(each, copies) for each in value)
    if type(value) is dict:
        return {name: _copied(each, copies) for name, each in value.items()}
    if type(value) is functools.partial:
        return functools.partial(value.func, *_copied(value.args, copies), **value.keywords)
    return value


PATCH = Patch(
    name="megatron.saves-of-one-step",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/nvidia-resiliency-ext/pull/376",
    changes_numbers=True,
    sites=tuple(
        Site(module, diagnose, replace={f"{CALLER}.{SCHEDULE}": hand_over_copies})
        for module in (
            "megatron.core.dist_checkpointing.strategies.async_utils",
            "nvidia_resiliency_ext.checkpointing.async_ckpt.core",
        )
    ),
)
