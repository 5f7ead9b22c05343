"""A step with more or fewer backward passes than the first one is reduced once, in full, at its end.

Symptom   with overlap_grad_reduce, Megatron learns in its first step how often each gradient becomes ready, and
          later reduces as soon as it has been ready that often. A step with more passes is reduced before its last
          one, silently; one with fewer dies with "Communication call has not been issued"; parameters frozen in
          the first step trip a bare assertion. Three kinds of job meet it: several forward-backward calls a step,
          in a number that varies, with gradients finished after the last, as in SkyRL; a varying number of
          microbatches where config.no_sync_func is not set; parameters frozen or unfrozen during training.
Upstream  unfixed in 0.16 to 0.19 and on main: NovaSky-AI/SkyRL#2146, Primus#1072. Up to 0.15 nothing is learned;
          there a second pass fails with "Cannot set grad twice".
Seam      the schedules, and the bucket groups' finish_grad_sync() and reset(). A step is held back by the switch
          that Megatron has for its first one (is_first_batch): hooks start nothing, finish_grad_sync() starts the
          reduce. A call's reduces wait for finish_grad_sync() if one of these is so: (a) nobody finishes gradients
          within it: config.finalize_model_grads_func is None, or was not seen to (one that once did not is never
          trusted again); (b) gradients of an earlier call of the step wait to be reduced; (c) each microbatch
          counts, and their number differs from that of the step learned from. A bucket group with frozen
          parameters reduces when it is finished, and learns nothing. All else overlaps as before, also the last
          call of a step whose others were in no_sync(). Correcting the learned counts is not an option: how many
          passes a step has is known only at its end.
Limits    if you finished gradients in every call and start deferring them mid-run, the reduce has begun before
          anyone can know: the second call of that step raises MegapatchError.
          Finishing more than once a step, and backward passes outside Megatron's schedules, are left to Megatron.
          A held step has no overlap. To keep that of its last call, put the others in no_sync().
          A run's first step is held: with virtual stages and a config.grad_sync_func its reduces come at its end,
          and in another order than Megatron's.
Numbers   change where a step was reduced before its last backward pass, to those of a run without overlap.
Cost      about 5 us and 0.5 us a bucket group in a forward-backward call, 0.5 us a bucket group in finishing and
          zeroing together. Nothing in a forward or backward pass, and nothing per parameter where it can overlap.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ..._mcore.bucket_groups import DDP, GROUP, bucket_groups
from ..._mcore.side_table import SideTable
from ..._python.dotted import temporarily_set
from ...errors import MegapatchError
from ...patch import ABSENT, FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict
from .._diagnosis import expect_none, resolve, running, unmet
from ._around_train import ddp_chunks
from ._stand_ins import FINISH, events_of_step

MODULE = "megatron.core"
SCHEDULES = "pipeline_parallel.schedules"
GROUPS = "distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
NO_PIPELINING = "forward_backward_no_pipelining"
PIPELINING = "forward_backward_pipelining_without_interleaving"
INTERLEAVING = "forward_backward_pipelining_with_interleaving"

_finished = SideTable()
"""By bucket group: whether this step's gradients are reduced."""
_unusual = SideTable()
"""By bucket group: whether Megatron should not learn from this step."""
_counted = SideTable()
"""By bucket group: the number of microbatches it has learned with; None if only the last counts."""
_defers = SideTable()
"""By a model's first chunk: whether its config.finalize_model_grads_func was seen to leave gradients
unfinished; nothing before the first call."""


def diagnose(module: ModuleType) -> Verdict:
    """Run the real bucket group's methods with as many passes as a stand-in has learned, more, and fewer."""
    if unmet.names(f"{GROUP}.__init__", "golden_per_param_grad_ready_counts"):
        expect_none(*unmet.names(f"{GROUP}.register_grad_ready", "params_with_grad"))
        return Verdict(ABSENT, "Megatron does not learn how often gradients become ready")
    with contextlib.suppress(ImportError):
        # megatron.core comes without it where Ctrl-C has ended its first import
        importlib.import_module(f"{MODULE}.{SCHEDULES}")
    missing = unmet.names(f"{DDP}.__init__", "bucket_groups", "expert_parallel_bucket_groups")
    for name in (NO_PIPELINING, PIPELINING, INTERLEAVING):
        schedule = f"{MODULE}.{SCHEDULES}:{name}"
        missing += unmet.parameters(schedule, "model", "num_microbatches", "forward_only")
        missing += unmet.names(schedule, "no_sync_func", "finalize_model_grads_func")
    expect_none(*missing)
    group = resolve(GROUP)
    with running("the bucket group's methods"):
        usual, first, more, fewer = (
            events_of_step(group, passes, learned) for passes, learned in ((1, 1), (1, 0), (2, 1), (1, 2))
        )
    if usual != ["pass 1"] or first != [FINISH]:
        return Verdict(
            UNKNOWN,
            f"expected a first step to be reduced in {FINISH}, and a later one of one backward pass in that pass; "
            f"found that the first {_in_words(first)}, the later one {_in_words(usual)}",
        )
    if more[-1:] in (["pass 2"], [FINISH]) and fewer == [FINISH]:
        return Verdict(FIXED, "a step with more or fewer passes than were learned is reduced after the last")
    return Verdict(
        NEEDED,
        f"after a first step of one backward pass, a step of two {_in_words(more)}; "
        f"after a first step of two, a step of one {_in_words(fewer)}",
    )


def hold_unusual_calls(schedule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(schedule)
    def patched_schedule(*args: Any, **kwargs: Any) -> Any:
        chunks = _overlapping(kwargs.get("model"))
        if not chunks or kwargs.get("forward_only"):
            return schedule(*args, **kwargs)
        with _held_if_unusual(chunks, kwargs.get("num_microbatches")):
            return schedule(*args, **kwargs)

    return patched_schedule


def finish_without_frozen(finish_grad_sync: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(finish_grad_sync)
    def patched_finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.ddp_config.overlap_grad_reduce:
            return finish_grad_sync(self, *args, **kwargs)
        if self.grad_reduce_handle is None and not _finished.get(self, False) and _lacks_only_frozen(self):
            self.is_first_batch = True
            _unusual.set(self, True)
        result = finish_grad_sync(self, *args, **kwargs)
        _finished.set(self, True)
        _release(self)
        return result

    return patched_finish_grad_sync


def learn_from_usual_steps(reset: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reset)
    def patched_reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        _release(self)
        if _unusual.get(self, False):
            _unusual.set(self, False)
            self.per_param_grad_ready_counts = {}
        _finished.set(self, False)
        return reset(self, *args, **kwargs)

    return patched_reset


@contextlib.contextmanager
def _held_if_unusual(chunks: list[Any], num_microbatches: Any) -> Iterator[None]:
    """Hold back the reduce of a training call unless the call is like those Megatron has learned from."""
    call = _Call(chunks, num_microbatches)
    call.refuse_if_reducing()
    if call.comes_after_the_reduce():
        yield  # the caller's responsibility
        return
    # Pipelines start a reduce with it, whatever the groups' switches say.
    hooks: dict[str, Any] = {"grad_sync_func": None} if call.begin() else {}
    with temporarily_set(call.config, **hooks):
        yield
    call.end()


class _Call:
    """A forward-backward call that trains, of chunks that reduce in the backward pass."""

    def __init__(self, chunks: list[Any], num_microbatches: Any) -> None:
        self.first, self.config = chunks[0], chunks[0].config
        self.groups = [group for chunk in chunks for group in bucket_groups(chunk)]
        self.finalize = self.config.finalize_model_grads_func
        self.counted = num_microbatches if self.config.no_sync_func is None else None

    def refuse_if_reducing(self) -> None:
        """Raise MegapatchError if gradients of this call would come too late for a reduce that has begun."""
        if any(group.grad_reduce_handle is not None for group in self.groups):
            raise MegapatchError(
                "a reduce of this model's gradients has begun, and this forward-backward call comes too late for "
                "it: an earlier call in this step did not finish its gradients although calls used to, or it "
                "raised. Put all calls of a step but the last in ddp.no_sync(), or let every step finish its "
                "gradients after its calls. After ddp.finish_grad_sync() and ddp.zero_grad_buffer() a new step "
                "can begin"
            )

    def comes_after_the_reduce(self) -> bool:
        return any(_finished.get(group, False) for group in self.groups)

    def begin(self) -> bool:
        """Set the groups' switches, and return whether the reduce is held back."""
        is_one_of_several = any(group.per_param_grad_ready_counts for group in self.groups)
        held = (
            is_one_of_several or self._may_leave_gradients() or any(map(self._differs_from_learned, self.groups))
        )
        for group in self.groups:
            if not _has_learned(group):
                _counted.set(group, self.counted)
            if held:
                group.is_first_batch = True
            if is_one_of_several:
                _unusual.set(group, True)
        return held

    def end(self) -> None:
        """After a call that has not raised, note whether its gradients were finished within it."""
        ready = [g for g in self.groups if g.per_param_grad_ready_counts or g.grad_reduce_handle is not None]
        if not ready:  # the whole call was in the caller's own no_sync(), and does not matter to later calls
            for group in self.groups:
                _release(group)
        elif self.finalize is not None and not _defers.get(self.first, False):
            _defers.set(self.first, not all(_finished.get(group, False) for group in ready))

    def _may_leave_gradients(self) -> bool:
        """Return whether calls have not been seen to finish their gradients."""
        return self.finalize is None or _defers.get(self.first, True)

    def _differs_from_learned(self, group: Any) -> bool:
        return _has_learned(group) and _counted.get(group) != self.counted


def _overlapping(model: Any) -> list[Any]:
    """Return those of the model's chunks that reduce in the backward pass."""
    chunks = ddp_chunks(model if isinstance(model, list) else [model])
    return [chunk for chunk in chunks if chunk.ddp_config.overlap_grad_reduce]


def _has_learned(group: Any) -> bool:
    return bool(group.golden_per_param_grad_ready_counts)


def _release(group: Any) -> None:
    """End a hold: the counts learned before it apply again."""
    if group.is_first_batch and _has_learned(group):
        group.is_first_batch = False


def _lacks_only_frozen(group: Any) -> bool:
    """Return whether the reduce waits for gradients of frozen parameters only, which is then so on every rank."""
    counts, learned = group.per_param_grad_ready_counts, group.golden_per_param_grad_ready_counts
    missing = [param for param in group.params if counts.get(param, 0) < learned.get(param, 1)]
    return bool(missing) and not any(param.requires_grad for param in missing)


def _in_words(events: list[str]) -> str:
    reduced = [event for event in events if not event.endswith("Error")]
    words = [f"is reduced in {' and '.join(reduced)}"] if reduced else []
    words += [f"fails with {event}" for event in events if event.endswith("Error")]
    return " and ".join(words) or "is never reduced"


PATCH = Patch(
    name="megatron.grad-ready-window",
    doc=__doc__,
    upstream="https://github.com/NovaSky-AI/SkyRL/pull/2146",
    sites=(
        Site(
            MODULE,
            diagnose,
            replace={
                f"{SCHEDULES}.{NO_PIPELINING}": hold_unusual_calls,
                f"{SCHEDULES}.{PIPELINING}": hold_unusual_calls,
                f"{SCHEDULES}.{INTERLEAVING}": hold_unusual_calls,
                f"{GROUPS}.finish_grad_sync": finish_without_frozen,
                f"{GROUPS}.reset": learn_from_usual_steps,
            },
        ),
    ),
    changes_numbers=True,
    leaves=tuple(
        (
            f"_ParamAndGradBucketGroup.{name}",
            "Megatron learns from the first step in a pipeline, too, as it is held",
        )
        for name in ("is_first_batch", "per_param_grad_ready_counts", "golden_per_param_grad_ready_counts")
    ),
)
