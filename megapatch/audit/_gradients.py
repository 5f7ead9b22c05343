"""reduced-once, fresh-gradients, gradients-used, gradients-dropped, gradients-arrive, stepped-once: by bucket.

Watches   the hooks that DistributedDataParallel gives to its parameters, _ParamAndGradBuffer.reset(), and
          start_grad_sync() of the bucket groups, in all releases. They are counted by bucket, and judged as the
          optimizer step begins. If others have a gradient in a step, a parameter without one is noted: at once
          if it had any before, else in the steps that compare ranks.
Limits    chunks that were wrapped before any audit began are not judged, nor Megatron-FSDP and torch's FSDP2,
          which have no buckets. Gradients that are zeroed by hand, without reset(), are looked at where a
          gradient would be added to old ones. A replayed CUDA graph runs no hook. Gradients that are dropped
          while an exception is handled, by an abort, or for a rerun, are dropped on purpose; others perhaps.
          Gradients that are written by hand after they were zeroed or used are taken for new ones. Experts have no
          gradient where they had no tokens; a gradient of zero has arrived.
Cost      a fraction of a microsecond a parameter and microbatch; no collective, no sync.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from .._mcore.rerun_machine import is_rerunning
from .._mcore.side_table import SideTable
from ..patch import Site
from ._audit import Audit, Call, Part, Step
from ._chunks import (
    STATES,
    BucketState,
    grad_buffers,
    is_zero,
    numbers_of,
    ranks_of,
    state_of,
    states_in,
    states_of,
)
from ._findings import GONE, describe, observes
from ._watching import around, before, site

_watchers = SideTable()
"""By chunk: the Gradients of the audit that watches it now, as its hooks outlive an audit."""
_WITH_GRADIENTS = ("fresh-gradients", "gradients-used", "gradients-dropped", "gradients-arrive", "stepped-once")


class Gradients(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._used: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        """By optimizer: its gradients when it last stepped, as numbers that change with them."""
        self._finished: weakref.WeakSet[Any] = weakref.WeakSet()
        """Chunks whose gradients finalize_model_grads() was given since their last step."""
        self.apart: weakref.WeakSet[Any] = weakref.WeakSet()
        """Chunks that were stepped with gradients of this rank alone, or that were reduced by hand."""
        self._left: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        """By chunk: how often its gradients had been changed in place as its last step ended."""
        self._by_hand: weakref.WeakSet[Any] = weakref.WeakSet()
        """Chunks whose gradients were changed by hand since their last step, as where they decay."""
        self._aborting = 0
        """How many calls that drop gradients on purpose are under way."""

    def sites(self) -> Iterator[Site]:
        package, reset = "megatron.core.distributed", before(self._note_reset)
        watched = {"_ParamAndGradBuffer.reset": reset, "_ParamAndGradBucketGroup.start_grad_sync": watch_reduces}
        yield site(f"{package}.param_and_grad_buffer", watched)
        hooks = {"DistributedDataParallel._make_backward_post_hook": self.watch_arrivals}
        yield site(f"{package}.distributed_data_parallel", hooks)
        abort = around(self._begin_abort, self._end_abort)
        yield site("megapatch.train_step._step", {"TrainStep.abort": abort})
        worker = "nemo_rl.models.policy.workers.megatron_policy_worker"
        yield site(worker, {"MegatronPolicyWorkerImpl.abort_train_step": abort}, optional="up to v0.7")

    # ------------------------------------------------------------------------ events
    def watch_arrivals(self, make_hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make_hook)
        def patched_make_backward_post_hook(ddp: Any, param: Any) -> Any:
            self._join(ddp)
            hook, place = make_hook(ddp, param), self._place_of(ddp, param)
            if place is None:
                return hook
            state, number = place
            arrived, owner = state.arrived, weakref.ref(ddp)  # what the hook itself holds may become a proxy

            def audited_hook(*unused: Any) -> Any:
                # It runs for each parameter in each backward pass: nothing is looked up here.
                watcher = state.watcher
                if watcher is not None:
                    if state.reduces or state.stepped:
                        watcher.note_late(owner(), state, number)
                    state.arrivals += 1
                    arrived[number] = True
                return hook(*unused)

            return audited_hook

        return patched_make_backward_post_hook

    @observes
    def _place_of(self, ddp: Any, param: Any) -> tuple[BucketState, int] | None:
        """Return a parameter's bucket and its number there, or None; buckets are made before any hook."""
        group = ddp.param_to_bucket_group.get(param)
        if group is None:
            return None
        state = state_of(group.param_to_bucket[param])
        return state, state.numbers[id(param)]

    @observes
    def _join(self, chunk: Any) -> None:
        if _watchers.get(chunk) is not self:
            _watchers.set(chunk, self)
            self.audit.models.add([chunk])
            self.audit.may_have_broken = True
            for state in states_of(chunk):
                state.begin(self)
            for part in self.audit.parts:
                part.joined(chunk)

    @observes
    def note_late(self, ddp: Any, state: BucketState, number: int) -> None:
        """See a gradient in a bucket that was reduced, or that a step has used: it may yet be zeroed."""
        param = state.parameters[number]
        if state.stepped:
            is_old = ddp not in self._by_hand and not is_zero(state, param)  # else zeroed by hand
            state.reset()  # a finding once a step and bucket
            if is_old:
                what = (
                    f"the gradient of {_name_of(ddp, [param])} is added to those that the last optimizer step used"
                )
                state.late = "fresh-gradients", "after-step", what, self.ledger.here()
        elif state.late is None:
            what = f"the gradient of {_name_of(ddp, [param])} is added to a bucket after its reduce has begun"
            if is_under_way(state.group and state.group()):
                state.late = "reduced-once", "late", what, self.ledger.here()
            else:  # a note at once: there may never be a step of Megatron's
                self.ledger.report("reduced-once", "later", what)

    @observes
    def _note_reset(self, buffer: Any, *_: Any, **__: Any) -> None:
        self.audit.resets += 1
        for part in self.audit.parts:
            part.zeroed(buffer)

    def zeroed(self, buffer: Any) -> None:
        on_purpose = bool(self._aborting) or sys.exc_info()[0] is not None or is_rerunning()
        for state in states_in(buffer):
            if state.arrivals and not state.stepped:
                self.audit.may_have_broken = True
                state.dropped |= not (on_purpose or state.excused)
                state.excused = False
            state.reset()

    def _begin_abort(self, *_: Any, **__: Any) -> None:
        self._aborting += 1

    def _end_abort(self, *_: Any, **__: Any) -> None:
        self._aborting -= 1

    def interrupted(self, chunks: list[Any]) -> None:
        for chunk in chunks:
            for state in states_of(chunk):
                state.excused = True

    def begin_call(self, call: Call) -> None:
        for chunk in call.chunks:
            self._join(chunk)
            now = _versions(chunk)
            if self._left.pop(chunk, now) != now:
                self._by_hand.add(chunk)

    def finishing(self, chunks: list[Any], num_tokens: Any) -> None:
        self._finished.update(chunks)

    def end(self) -> None:
        for chunk in list(self.audit.models.chunks):
            _watchers.pop(chunk)
            for state in states_of(chunk):
                state.begin(None)

    # ------------------------------------------------------------------------ judged in the step
    def begin_step(self, step: Step) -> None:
        """Report buckets that were not reduced once, and gradients that were not used."""
        are_new = any(state.arrivals for chunk in step.chunks for state in states_of(chunk))
        for chunk in step.chunks:
            step.has_gradients |= self._judge(chunk, are_new)
        if not step.has_gradients:
            return
        self.ledger.judged.update(_WITH_GRADIENTS)
        if not are_new and self._used.get(step.optimizer) == numbers_of(step.chunks):
            what = "the optimizer steps on gradients that its last step has used"
            self.ledger.report("stepped-once", "again", what)
        if are_new:
            self._judge_arrivals(step)

    def _judge(self, chunk: Any, are_new: bool) -> bool:
        """Report the buckets of one chunk. Return whether it has any gradients, new or used.

        Args:
            are_new: whether any gradients have come to the model since they were zeroed.
        """
        states = states_of(chunk)
        if dropped := [state for state in states if state.dropped]:
            self._judge_dropped(chunk, dropped, are_new)
        for state in states:
            if state.late is not None:
                self.ledger.report(*state.late)
        self._judge_reduces(chunk, states)
        return any(state.arrivals or state.stepped for state in states)

    def _judge_dropped(self, chunk: Any, dropped: list[BucketState], are_new: bool) -> None:
        name = _name(chunk, dropped)
        if are_new:
            what = f"the gradients of {name} were zeroed, and others came, before the optimizer step"
            self.ledger.report("gradients-dropped", "zeroed", what)
        elif all(map(is_zero, dropped)):  # else others were written by hand
            what = f"the gradients of {name} were zeroed right before the optimizer step"
            self.ledger.report("gradients-used", "right-before", what)

    def _judge_reduces(self, chunk: Any, states: list[BucketState]) -> None:
        # No list of all states: in ordinary steps the audit allocates nothing large.
        first = next((state for state in states if state.arrivals and not state.stepped), None)
        self.ledger.judged["reduced-once"] += first is not None and ranks_of(first) > 1
        others = (state for state in states if state.reduces != 1 and state.arrivals and not state.stepped)
        suspects = [state for state in others if ranks_of(state) > 1]
        unreduced = [state for state in suspects if not state.reduces]
        repeated = [state for state in suspects if state.reduces]
        is_finished = chunk in self._finished or not unreduced
        (self.apart.discard if is_finished else self.apart.add)(chunk)
        if unreduced:
            kind, more = ("never", "") if is_finished else ("unfinished", ", nor given to finalize_model_grads()")
            what = f"the gradients of {_name(chunk, unreduced)} were not reduced{more}"
            self.ledger.report("reduced-once", kind, what)
        if repeated:
            times = max(state.reduces for state in repeated)
            what = f"the gradients of {_name(chunk, repeated)} were reduced {times} times"
            self.ledger.report("reduced-once", "averaged" if _averages(chunk, repeated) else "repeated", what)

    def _judge_arrivals(self, step: Step) -> None:
        """Note parameters without a gradient in a step in which others have one."""
        if self.ledger.has_captured:  # replays run no hook
            return
        unusual = [
            state
            for chunk in step.chunks
            for state in states_of(chunk)
            if not (state.all_had and all(state.arrived))
        ]
        lacking = [lacks for state in unusual for lacks in _without_gradient(state)]
        for state in unusual:
            state.note_had()
        stopped = [parameter for parameter, had in lacking if had]
        never = [parameter for parameter, had in lacking if not had] if self.audit.is_due() else []
        self._report_arrivals(step, "stopped", stopped, "had gradients in earlier steps, and none")
        self._report_arrivals(step, "never", never, "has never had a gradient, nor one")

    def _report_arrivals(self, step: Step, kind: str, parameters: list[Any], what: str) -> None:
        if not parameters:
            return
        frozen = "" if any(each.requires_grad for each in parameters) else " (requires_grad is False now)"
        named = [pair for chunk in step.chunks for pair in chunk.module.named_parameters()]
        name = describe(parameters, named)
        text = f"{name}{frozen} {what} in this step, in which others have"
        self.ledger.report("gradients-arrive", "gone" if name.startswith(GONE) else kind, text)

    def end_step(self, step: Step) -> None:
        """Note that the step has used the gradients."""
        for chunk in step.chunks:
            for state in states_of(chunk):
                if state.arrivals:
                    state.stepped = True
                    state.take()
                state.dropped, state.excused, state.late = False, False, None
            self._left[chunk] = _versions(chunk)
        self._finished.difference_update(step.chunks)
        self._by_hand.difference_update(step.chunks)
        if step.succeeded:
            self._used[step.optimizer] = numbers_of(step.chunks)


def watch_reduces(start: Callable[..., Any]) -> Callable[..., Any]:
    """Count reduces, in a function that begins one."""

    @functools.wraps(start)
    def patched_start_grad_sync(group: Any, *args: Any, **kwargs: Any) -> Any:
        # It runs for each group in each step; a chunk's groups know their buckets since it joined.
        was_under_way = is_under_way(group)
        result = start(group, *args, **kwargs)
        if not was_under_way:  # else, from 0.16 on, a call for one more in a first step does nothing
            for state in STATES.get(group, ()):
                state.reduces += 1
        return result

    return patched_start_grad_sync


def is_under_way(group: Any) -> bool:
    """Return whether a reduce of a bucket group was begun, and not waited for."""
    return getattr(group, "grad_reduce_handle", None) is not None


def _versions(chunk: Any) -> list[int]:
    return [buffer.grad_data._version for buffer in grad_buffers([chunk])]


def _averages(chunk: Any, states: list[BucketState]) -> bool:
    """Return whether an average stays what it is when it is reduced again."""
    import torch.distributed as dist

    is_whole = not (chunk.ddp_config.use_distributed_optimizer or chunk.config.calculate_per_token_loss)
    return is_whole and all(ranks_of(state) == dist.get_world_size() for state in states)


def _name(chunk: Any, states: list[BucketState]) -> str:
    return _name_of(chunk, [parameter for state in states for parameter in state.parameters])


def _name_of(chunk: Any, parameters: list[Any]) -> str:
    return describe(parameters, chunk.module.named_parameters())


def _without_gradient(state: BucketState) -> Iterator[tuple[Any, bool]]:
    """Yield the parameters of a bucket without a gradient in this step, and whether they have had any before."""
    for parameter, has_arrived, had in zip(state.parameters, state.arrived, state.had, strict=True):
        if not has_arrived and getattr(parameter, "allreduce", True):
            yield parameter, had
