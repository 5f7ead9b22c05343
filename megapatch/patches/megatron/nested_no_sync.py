"""An outer `with ddp.no_sync():` stays in force when an inner one exits.

Symptom   an optimizer step split over several forward-backward calls reduces too early. Each call's schedule uses
          no_sync() itself, and its exit also ends the caller's own `with ddp.no_sync():` around the call.
          Up to 0.15 gradients are reduced before the step is complete, and the next backward pass fails
          on "Cannot set grad twice". From 0.16 on Megatron learns from its first step how many backward passes
          a step has, and learns the wrong number; or, if that step was not split, reduces after the first call
          of a later one and never reduces the rest: training continues, silently, with wrong gradients.
Upstream  unfixed in 0.12 to 0.19 and on main: leaving no_sync() lets every bucket group reduce, whatever its
          state before. NVIDIA-NeMo/RL#3660 and its forerunners #2683 and #2831 work around it.
Seam      the class attribute of DistributedDataParallel; the original context manager runs inside ours, which
          afterwards holds back again the groups that were held back before it and throughout. The last exit, and
          any use that is not nested, are Megatron's own.
Limits    no_sync() holds back only the reduces that start when a gradient becomes ready. config.grad_sync_func and
          config.finalize_model_grads_func reduce inside it too, so set them aside as well. zero_grad_buffer()
          ends it, and so does leaving the outer context before the inner one.
          The no_sync of Megatron-FSDP is a different one, and that of TorchFullyShardedDataParallel does nothing.
          A bound method taken before activation (config.no_sync_func = ddp.no_sync) remains Megatron's own.
Numbers   change where no_sync() is nested and nothing failed (from 0.16), to those of a step that is not split.
Cost      about 2 us a use, of which a schedule makes one a call; nothing in a forward or backward pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ..._mcore.bucket_groups import DDP, GROUP, MODULE, bucket_groups
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict, unpatched
from .._diagnosis import StandIn, expect_none, running, unmet


def diagnose(module: ModuleType) -> Verdict:
    """Nest the real context manager on a stand-in that has nothing but bucket groups."""
    expect_none(
        *unmet.attributes(DDP, "no_sync"),
        *unmet.names(f"{DDP}.__init__", "bucket_groups", "expert_parallel_bucket_groups"),
        *unmet.names(f"{GROUP}.register_grad_ready", "is_last_microbatch"),
    )
    with running("no_sync()"):
        seen = _flags_when_nested(unpatched(module.DistributedDataParallel.no_sync))
    holding = {place: not any(may_reduce) for place, may_reduce in seen.items()}
    if not (holding["outer"] and holding["inner"] and all(seen["after"])):
        return Verdict(
            UNKNOWN,
            "expected no_sync() to clear is_last_microbatch of all bucket groups, and to set it at the end",
        )
    if holding["outer again"]:
        return Verdict(FIXED, "an outer no_sync() stays in force when an inner one exits")
    return Verdict(NEEDED, "an inner no_sync() that exits ends the outer one as well")


def keep_outer_in_force(no_sync: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def nested(ddp: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        outer = [group for group in bucket_groups(ddp) if not group.is_last_microbatch]
        try:
            with no_sync(ddp, *args, **kwargs) as value:
                try:
                    yield value
                finally:
                    # An inner context that is closed late (by the garbage collector, after an exception in a
                    # schedule) must not bring back an outer one that is gone.
                    outer = [group for group in outer if not group.is_last_microbatch]
        finally:
            for group in outer:
                group.is_last_microbatch = False

    @functools.wraps(no_sync)
    def patched_no_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        return nested(self, *args, **kwargs)

    return patched_no_sync


def _flags_when_nested(no_sync: Callable[..., Any]) -> dict[str, list[bool]]:
    """Return whether each bucket group of a stand-in may reduce, in and after two nested uses."""
    groups = [StandIn(is_last_microbatch=True) for _ in range(2)]
    ddp = StandIn(ddp_config=StandIn(), bucket_groups=groups[:1], expert_parallel_bucket_groups=groups[1:])
    seen = {}

    def look(place: str) -> None:
        seen[place] = [group.is_last_microbatch for group in groups]

    with no_sync(ddp):
        look("outer")
        with no_sync(ddp):
            look("inner")
        look("outer again")
    look("after")
    return seen


PATCH = Patch(
    name="megatron.nested-no-sync",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/RL/pull/3660",
    sites=(Site(MODULE, diagnose, replace={"DistributedDataParallel.no_sync": keep_outer_in_force}),),
    changes_numbers=True,
)
