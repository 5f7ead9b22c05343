"""A forced gather of the layer-wise optimizer's parameters arrives, and leaves gradients alone.

Symptom   with overlap_param_gather: an evaluation, a save or an export between two forward-backward calls of a
          step wipes the gradients of the first, silently. After a forward pass that raised, parameters are some
          steps old, other ones on each rank.
Upstream  the kind of NVIDIA/Megatron-LM#4609, #7131, #7132; in 0.17 to 0.19. disable_forward_pre_hook() forces a
          gather. One that is under way is waited for, and what it brought is not copied into the parameters. One
          that is new receives in the gradients' buffer from 0.18 on, and zeroes that.
Seam      start_param_sync() of bucket groups, where it is forced: what is under way is finished as a forward pass
          does. Around a new gather the gradients are put aside.
Limits    a forward pass with the hooks on, between finishing gradients and the optimizer's step, gathers in its
          own way, and wipes them: take the hooks off and put them on around it.
Numbers   change where gradients or parameters were lost, to those of a run that was not interrupted.
Cost      a copy of the gradients in a forced gather, bucket group by bucket group. Nothing in a step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._mcore.bucket_groups import GROUP
from ..._mcore.known import arguments_of
from ...patch import FIXED, NEEDED, Patch, Site, Verdict, unpatched
from .._diagnosis import StandIn, before_release, expect_none, gone, reads_in_order, resolve, running, unmet

MODULE, _, CLASS = GROUP.partition(":")
START = f"{GROUP}.start_param_sync"
LIST = "layerwise_gather_list"


def diagnose(module: ModuleType) -> Verdict:
    """Force the real gather while one is under way: what it brought is gone once it has been copied."""
    if LIST not in reads_in_order(resolve(START), LIST):
        return gone(LIST, module, before_release("megatron-core", "0.17"))
    expect_none(
        *unmet.parameters(START, "force_sync"),
        *unmet.parameters(f"{GROUP}.finish_param_sync", "skip_next_bucket_dispatch"),
    )
    bucket = StandIn(layerwise_gather_list=[], layerwise_params_list=[], grad_data=StandIn(zero_=lambda: None))
    group = StandIn(
        ddp_config=StandIn(overlap_param_gather=True, use_distributed_optimizer=False),
        param_gather_handle=StandIn(wait=lambda: None),
        param_gather_dispatched=True,
        next_param_gather_bucket_group=None,
        intra_distributed_optimizer_instance_rank=0,
        buckets=[bucket],
        _post_param_sync=lambda: None,
    )
    with running("start_param_sync()"):
        unpatched(getattr(module, CLASS).start_param_sync)(group, force_sync=True)
    if bucket.layerwise_gather_list is None and "zero_" not in reads_in_order(resolve(START), "zero_"):
        return Verdict(FIXED, "a forced gather copies what it brought, and leaves gradients alone")
    return Verdict(NEEDED, "a forced gather loses what it brought, or gradients")


def arrive_beside_gradients(start_param_sync: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(start_param_sync)

    @functools.wraps(start_param_sync)
    def patched_start_param_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.ddp_config
        is_forced = arguments_of(signature, (self, *args), kwargs).get("force_sync") is True
        if not is_forced or config.use_distributed_optimizer or not config.overlap_param_gather:
            return start_param_sync(self, *args, **kwargs)
        if self.param_gather_handle is not None:
            return self.finish_param_sync(skip_next_bucket_dispatch=True)
        gradients = [bucket.grad_data.clone() for bucket in self.buckets]
        result = start_param_sync(self, *args, **kwargs)
        for bucket, gradient in zip(self.buckets, gradients, strict=True):
            bucket.grad_data.copy_(gradient)
        return result

    return patched_start_param_sync


PATCH = Patch(
    name="megatron.layer-wise-gathers",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/issues/7131",
    changes_numbers=True,
    sites=(Site(MODULE, diagnose, replace={f"{CLASS}.start_param_sync": arrive_beside_gradients}),),
)
