"""Run a step through the real methods of Megatron's bucket group, on a stand-in with two parameters."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from ..._mcore.bucket_groups import GROUP
from ...patch import unpatched
from .._diagnosis import ASSERTIONS, StandIn

FINISH = "finish_grad_sync()"


LEARNED = "golden_per_param_grad_ready_counts"
"""Attribute of a bucket group, from 0.16 on: how often each gradient became ready in its first step."""


def events_of_step(group: Any, passes: int, learned: int, unused: bool = False) -> list[str]:
    """Return when a stand-in reduces in a step, in words; and the error that ends it.

    Args:
        group: the class of bucket groups.
        passes: backward passes of the step.
        learned: passes of the steps that the stand-in has learned from; 0: it has learned nothing yet. Up to 0.15
            Megatron does not learn.
        unused: a second parameter gets no gradient in this step.
    """
    seen: list[str] = []
    place = ""

    def start_grad_sync(**ignored: Any) -> None:
        seen.append(place)
        stand_in.grad_reduce_handle = SimpleNamespace(wait=lambda: None)

    params = ["weight", "unused"] if unused else ["weight"]
    stand_in = StandIn(
        ddp_config=StandIn(overlap_grad_reduce=True, num_distributed_optimizer_instances=1),
        buckets=[],
        params=set(params),
        param_to_bucket=dict.fromkeys(params),
        params_with_grad=set(),
        golden_per_param_grad_ready_counts=dict.fromkeys(params, learned) if learned else {},
        per_param_grad_ready_counts={},
        is_last_microbatch=True,
        is_first_batch=not learned,
        grad_reduce_handle=None,
        grad_reduce_finished=False,
        start_grad_sync=start_grad_sync,
        _copy_back_extra_main_grads=lambda: None,
    )
    try:
        for number in range(passes):
            place = f"pass {number + 1}"
            unpatched(group.register_grad_ready)(stand_in, "weight")
        place = FINISH
        unpatched(group.finish_grad_sync)(stand_in)
        stand_in.is_last_microbatch = False
        unpatched(group.reset)(stand_in)
        left = stand_in.per_param_grad_ready_counts or stand_in.params_with_grad or not stand_in.is_last_microbatch
        learns = LEARNED in unpatched(group.__init__).__code__.co_names and passes and not unused
        if left or (learns and (stand_in.is_first_batch or not getattr(stand_in, LEARNED))):
            seen.append("the step after it")  # for which nothing of this one may be left but what was learned
    except ASSERTIONS as error:
        seen.append(type(error).__name__)
    except AttributeError:  # under -O, which removes the assertion that there is something to wait for
        if __debug__ or stand_in.grad_reduce_handle is not None:
            raise
        seen.append("AttributeError")
    return seen


def missing_in_finish() -> list[str]:
    """Return the effects that patches of parameter gathers expect of finish_grad_sync(), and the real one lacks.

    A step has new parameters to gather, so finishing its gradients ends the gathers of the old ones.
    """
    stand_in = StandIn(
        ddp_config=StandIn(overlap_grad_reduce=True, num_distributed_optimizer_instances=1),
        buckets=[],
        params=(),
        params_with_grad=set(),
        per_param_grad_ready_counts={},
        grad_reduce_handle=SimpleNamespace(wait=lambda: None),
        param_gather_dispatched=True,
        _copy_back_extra_main_grads=lambda: None,
    )
    name, _, group = GROUP.partition(":")
    unpatched(getattr(sys.modules[name], group).finish_grad_sync)(stand_in)
    return ["param_gather_dispatched cleared by finish_grad_sync()"] if stand_in.param_gather_dispatched else []
