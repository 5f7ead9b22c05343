"""reduced-once, fresh-gradients, gradients-used: what becomes of each bucket's gradients between two zeroings.

Symptom   a bucket is reduced before its last gradient, twice, or not at all; a step begins on the gradients of the
          step before; or gradients are zeroed before a step has used them. Nothing fails: the loss goes down, only
          not as it should.
Upstream  NovaSky-AI/SkyRL#2146, NVIDIA-NeMo/RL#3660, NVIDIA/Megatron-LM#1150.
Seam      the hooks that DistributedDataParallel gives to its parameters, _ParamAndGradBuffer.reset(), and
          start_grad_sync() of the bucket groups. They are counted by bucket, and judged in the optimizer step.
Limits    chunks that were wrapped before the audit began are not judged, nor Megatron-FSDP and torch's FSDP2,
          which have no buckets. Gradients that are zeroed by hand, without reset(), are looked at where a
          gradient would be added to old ones. A replayed CUDA graph runs no hook. Gradients that are dropped while
          an exception is handled, by an abort, or for a rerun, are dropped on purpose.
Cost      about a microsecond a parameter and microbatch; no collective, no sync.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from .._mcore.bucket_groups import bucket_groups
from .._mcore.rerun_machine import is_rerunning
from ..patch import Patch
from . import _tokens
from ._findings import LEDGER, describe, observes
from ._optimizers import DDPS
from ._sites import site

STATE = "_megapatch_audit"
"""Attribute of a bucket: its BucketState."""


_aborting: list[bool] = []
"""Whether something that drops gradients on purpose is under way."""


class Events:
    """How many gradients have arrived, and how many buffers were zeroed, in this process."""

    arrivals = 0
    resets = 0

    @classmethod
    def now(cls) -> tuple[int, int]:
        return cls.arrivals, cls.resets


class BucketState:
    """The history of a bucket's gradients since they were zeroed."""

    __slots__ = ("arrivals", "dropped", "excused", "reduces", "stepped")

    def __init__(self) -> None:
        self.arrivals = 0
        self.reduces = 0
        self.stepped = False  # whether an optimizer step has used them
        self.dropped = 0  # how often they were zeroed unused since the last step
        self.excused = False  # whether a call was interrupted, so that they may be dropped

    def reset(self) -> None:
        self.arrivals, self.reduces, self.stepped = 0, 0, False


def _state(bucket: Any) -> BucketState:
    state: BucketState | None = getattr(bucket, STATE, None)
    if state is None:
        state = BucketState()
        setattr(bucket, STATE, state)
    return state


# ------------------------------------------------------------------------ what happens
def watch_arrivals(make_hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make_hook)
    def patched_make_backward_post_hook(self: Any, param: Any) -> Any:
        _note_chunk(self)
        hook = make_hook(self, param)

        def audited_hook(*unused: Any) -> Any:
            _note_arrival(self, param)
            return hook(*unused)

        return audited_hook

    return patched_make_backward_post_hook


@observes
def _note_chunk(ddp: Any) -> None:
    DDPS.setdefault(ddp)


@observes
def _note_arrival(ddp: Any, param: Any) -> None:
    group = ddp.param_to_bucket_group.get(param)
    if group is None:
        return
    bucket = group.param_to_bucket[param]
    Events.arrivals += 1
    state = _state(bucket)
    if state.stepped:
        if _is_zero(bucket, param):
            state.reset()  # by hand
        else:
            LEDGER.report(
                "fresh-gradients",
                "after-step",
                f"the gradient of {_name(ddp, [param])} is added to those that the last optimizer step used",
            )
            state.reset()  # once a step
    elif state.reduces:
        LEDGER.report(
            "reduced-once",
            "added-after",
            f"the gradient of {_name(ddp, [param])} is added to a bucket after its reduce has begun",
        )
    state.arrivals += 1


def _is_zero(bucket: Any, param: Any) -> bool:
    """Return whether a bucket holds nothing: asked only where it should not hold anything, as it waits for a GPU.

    A fused backward pass has added the parameter's own gradient by now.
    """
    own = getattr(param, "grad_added_to_main_grad", False)
    grads = [other.main_grad for other in bucket.params if not (own and other is param)]
    return bool(grads) and not any(bool(grad.any()) for grad in grads)


def watch_resets(reset: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reset)
    def patched_reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        _note_reset(self)
        return reset(self, *args, **kwargs)

    return patched_reset


@observes
def _note_reset(buffer: Any) -> None:
    Events.resets += 1
    on_purpose = bool(_aborting) or sys.exc_info()[0] is not None or is_rerunning()
    for bucket in buffer.buckets:
        state = _state(bucket)
        if state.arrivals and not state.stepped:
            state.dropped += not (on_purpose or state.excused)
            state.excused = False
        state.reset()
    _tokens.forget(buffer)


def watch_abort(abort: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(abort)
    def patched_abort(*args: Any, **kwargs: Any) -> Any:
        _aborting.append(True)
        try:
            return abort(*args, **kwargs)
        finally:
            _aborting.pop()

    return patched_abort


def excuse(ddps: Iterable[Any]) -> None:
    """Note that a call was interrupted: whoever catches that may drop its gradients."""
    for ddp in ddps:
        for group in bucket_groups(ddp):
            for bucket in group.buckets:
                _state(bucket).excused = True


def watch_reduces(start_grad_sync: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start_grad_sync)
    def patched_start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        # From 0.16 on, a call for what is under way in a first step does nothing.
        under_way = getattr(self, "grad_reduce_handle", None) is not None
        result = start_grad_sync(self, *args, **kwargs)
        if not under_way:
            _note_reduce(self)
        return result

    return patched_start_grad_sync


@observes
def _note_reduce(group: Any) -> None:
    for bucket in group.buckets:
        _state(bucket).reduces += 1


# ------------------------------------------------------------------------ what a step finds
@observes
def judge(ddps: Iterable[Any]) -> bool:
    """Report, as a step begins, buckets that were not reduced once. Return whether any gradient has arrived."""
    any_arrived = False
    for ddp in ddps:
        unreduced, repeated, unused, times = [], [], [], 0
        for group in bucket_groups(ddp):
            for bucket in group.buckets:
                state = _state(bucket)
                any_arrived |= state.arrivals > 0
                if state.arrivals and state.dropped:
                    unused += list(bucket.params)
                if not state.arrivals or state.stepped or _ranks(group) == 1:
                    continue
                if state.reduces == 0:
                    unreduced += list(bucket.params)
                elif state.reduces > 1:
                    repeated += list(bucket.params)
                    times = max(times, state.reduces)
        if unused:
            what = f"the gradients of {_name(ddp, unused)} were zeroed, and others came, before the optimizer step"
            LEDGER.report("gradients-used", "zeroed", what)
        if unreduced:
            LEDGER.report("reduced-once", "never", f"the gradients of {_name(ddp, unreduced)} were not reduced")
        if repeated:
            LEDGER.report(
                "reduced-once", "repeated", f"the gradients of {_name(ddp, repeated)} were reduced {times} times"
            )
    return any_arrived


@observes
def note_step(ddps: Iterable[Any]) -> None:
    """Note that an optimizer step has used the gradients."""
    for ddp in ddps:
        for group in bucket_groups(ddp):
            for bucket in group.buckets:
                state = _state(bucket)
                state.stepped = state.stepped or state.arrivals > 0
                state.dropped, state.excused = 0, False


def _ranks(group: Any) -> int:
    """Return the number of ranks over which a bucket group is reduced."""
    size = getattr(group, "intra_distributed_optimizer_instance_size", None)
    ranks = int(group.data_parallel_group.size() if size is None else size)
    others = getattr(group, "inter_distributed_optimizer_instance_group", None)
    return ranks if others is None else ranks * int(others.size())


def _name(ddp: Any, parameters: list[Any]) -> str:
    return describe(parameters, ddp.module.named_parameters())


# ------------------------------------------------------------------------ where
_NEMO_ABORT = "MegatronPolicyWorkerImpl.abort_train_step"
PATCH = Patch(
    name="audit.gradients",
    doc=__doc__,
    upstream="https://github.com/NovaSky-AI/SkyRL/pull/2146",
    sites=(
        site(
            "megatron.core.distributed.param_and_grad_buffer",
            {
                "_ParamAndGradBuffer.reset": watch_resets,
                "_ParamAndGradBucketGroup.start_grad_sync": watch_reduces,
            },
        ),
        site(
            "megatron.core.distributed.distributed_data_parallel",
            {"DistributedDataParallel._make_backward_post_hook": watch_arrivals},
        ),
        site("megapatch.train_step._step", {"TrainStep.abort": watch_abort}),
        site(
            "nemo_rl.models.policy.workers.megatron_policy_worker",
            {_NEMO_ABORT: watch_abort},
            since=_NEMO_ABORT,
        ),
    ),
)
