"""hooks-balanced, every-chunk-steps: calls and steps, as all parts see them.

Watches   the three functions that get_forward_backward_func() returns, should_run_forward_backward() of the
          rerun machine, and step() of Megatron's optimizers (the layer-wise one from 0.16 on), in all releases.
          Of optimizers that contain others the outermost step counts.
          An interrupted call, or a no_sync() that is entered twice, leaves hooks or flags behind: the next call
          reduces gradients in every microbatch, or in none. Or the rerun machine is still inside the step that an
          exception ended, and takes the next step for its end. This is judged as the next call begins: until
          then, the code that caught the exception may have put it right.
          As a call that trains begins, either all chunks that the call before has trained were stepped since, or
          none. A chunk that was never stepped, and whose gradients were dropped while an optimizer stepped zeros,
          has another model's optimizer.
Limits    the model config's hooks and timers, no_sync() and forward pre-hooks of the chunks, and the state of
          the rerun machine; not the state that a trainer keeps itself. A model that is trained and never stepped
          is not reported while no optimizer steps.
Cost      some microseconds a call, and a bucket in a step.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator
from types import MethodType
from typing import Any

from .._mcore.bucket_groups import chunks_of
from .._mcore.rerun_machine import BEFORE_STEP, MODULE, machine_of_this_process
from .._mcore.side_table import SideTable
from .._python.places import user_lines
from .._ranks import place
from ..patch import Site
from ._audit import Audit, Call, Part, Step
from ._chunks import is_zero, states_of
from ._findings import describe, observes, user_code
from ._samples import evenly_of
from ._watching import RAISED, around, before, site

SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)
_APART = 60.0
"""Seconds from one report of a process to the next, if nothing is found meanwhile."""
_NOTHING = object()


class Calls(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._left = SideTable()
        """About a model's first chunk: what a call that raised has changed, by name, and the user's code then."""
        self._functions = SideTable()
        """About a config: the names of those of its hundreds of fields that are for functions."""
        self.interrupted_machines: weakref.WeakSet[Any] = weakref.WeakSet()
        """Rerun machines that were inside a step when a call raised."""
        self._is_stepping = False
        self._left_report = 0.0
        self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        """Chunks that have had gradients since their last step."""
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        """Chunks that have had gradients, and were stepped."""
        self._passed_over: weakref.WeakSet[Any] = weakref.WeakSet()
        """Chunks before whose first step an optimizer has stepped others, which were never trained."""

    def sites(self) -> Iterator[Site]:
        calls = dict.fromkeys(SCHEDULES, around(self._begin, self._end))
        yield site("megatron.core.pipeline_parallel.schedules", calls)
        yield site(MODULE, {"RerunStateMachine.should_run_forward_backward": before(self._judge_machine)})
        steps = ("FP32Optimizer.step", "MixedPrecisionOptimizer.step", "ChainedOptimizer.step")
        package, watch_step = "megatron.core.optimizer", around(self._begin_outermost, self._end_outermost)
        yield site(f"{package}.optimizer", dict.fromkeys(steps, watch_step))
        yield site(f"{package}.layer_wise_optimizer", {"LayerWiseDistributedOptimizer.step": watch_step})

    # ------------------------------------------------------------------------ calls
    def _begin(self, *_: Any, **options: Any) -> tuple[Call, dict[str, Any] | None] | None:
        chunks = chunks_of(options.get("model"))
        if not chunks:
            return None
        call = Call(chunks, trains=not options.get("forward_only"))
        self._show_call(call)
        return call, self._look(chunks)

    def _end(self, begun: tuple[Call, dict[str, Any] | None] | None, result: Any, *_: Any, **__: Any) -> None:
        if begun is not None:
            call, before = begun
            call.has_returned = result is not RAISED
            self._compare(call, before)
            self._show_end_of_call(call)

    @observes
    def _show_call(self, call: Call) -> None:
        self.ledger.judged["hooks-balanced"] += 1
        self.audit.models.add(call.chunks)
        for part in self.audit.parts:
            part.begin_call(call)

    @observes
    def _show_end_of_call(self, call: Call) -> None:
        self.audit.may_have_broken |= not (call.trains and call.has_returned)
        if not call.trains:
            self.ledger.happened("forward-only")
        for part in self.audit.parts:
            part.end_call(call)
            if not call.has_returned:
                part.interrupted(call.chunks)

    # ------------------------------------------------------------------------ steps
    def _begin_outermost(self, optimizer: Any, *_: Any, **__: Any) -> tuple[Step | None] | None:
        """Return the step in a tuple; None for one that another contains."""
        if self._is_stepping:
            return None
        try:
            begun = (self._show_step(optimizer),)
        except BaseException:
            self._fail(optimizer)
            raise
        self._is_stepping = True
        return begun

    def _end_outermost(
        self, begun: tuple[Step | None] | None, result: Any, optimizer: Any, *_: Any, **__: Any
    ) -> None:
        if begun is None:
            return
        self._is_stepping = False
        self.ledger.step += 1
        if result is RAISED:
            self._fail(optimizer)
        elif begun[0] is not None:
            self._show_end_of_step(begun[0], result)

    @observes
    def _show_step(self, optimizer: Any) -> Step:
        step = Step(optimizer, self.audit.models.stepped_by(optimizer))
        for part in self.audit.parts:
            part.begin_step(step)
        return step

    @observes
    def _fail(self, optimizer: Any) -> None:
        """Have the gradients of a step that raised, perhaps the audit's own error, excused."""
        chunks = self.audit.models.stepped_by(optimizer)
        self.audit.may_have_broken = True
        for part in self.audit.parts:
            part.interrupted(chunks)

    @observes
    def _show_end_of_step(self, step: Step, result: tuple[Any, ...]) -> None:
        step.succeeded = bool(result[0])
        for part in self.audit.parts:
            part.end_step(step)
        self.audit.may_have_broken = False

    # ------------------------------------------------------------------------ hooks and flags
    @observes
    def _look(self, chunks: list[Any]) -> dict[str, Any]:
        """Return the state as a call begins; report changes of a call that raised, if they are still there."""
        found = _snapshot(chunks, self._functions_of(chunks[0].config))
        left, where = self._left.pop(chunks[0], ({}, ()))
        self._report("left", [name for name, value in left.items() if found.get(name) == value], where)
        return found

    @observes
    def _compare(self, call: Call, before: dict[str, Any] | None) -> None:
        if before is None:
            return
        after = _snapshot(call.chunks, self._functions_of(call.chunks[0].config))
        # A hook that was None may be set by the first call.
        changed = {name: value for name, value in after.items() if before.get(name, _NOTHING) not in (value, None)}
        if call.has_returned:
            self._report("changed", list(changed))
            return
        self._left.set(call.chunks[0], (changed, user_code()))
        machine = machine_of_this_process()
        if machine is not None and machine.state.name in BEFORE_STEP:
            self.interrupted_machines.add(machine)

    def _functions_of(self, config: Any) -> list[str]:
        fields = vars(config)
        names: list[str] = self._functions.get_or_make(
            config, lambda: [name for name in fields if name.endswith("_func")]
        )
        return names

    def _report(self, kind: str, names: list[str], where: tuple[str, ...] | None = None) -> None:
        if names:
            what = f"a forward-backward call did not put back {', '.join(names)}"
            self.ledger.report("hooks-balanced", kind, what, where)

    @observes
    def _judge_machine(self, machine: Any, *_: Any, **__: Any) -> None:
        if not self.interrupted_machines:
            return
        if machine in self.interrupted_machines and machine.state.name in BEFORE_STEP:
            what = f"the rerun machine is still {machine.state.name}, in a step that an exception has ended"
            self.ledger.report("hooks-balanced", "machine", f"{what}, and takes the step that begins for its end")
        self.interrupted_machines.discard(machine)

    # ------------------------------------------------------------------------ chunks and their steps
    def joined(self, chunk: Any) -> None:
        module = getattr(chunk, "module", None)
        count = sum(parameter.numel() for parameter in module.parameters()) if module is not None else 0
        self.ledger.happened("model", f"{count:,} parameters")

    def begin_call(self, call: Call) -> None:
        """Remember where the call is made, and report chunks that were not stepped with the others."""
        self.ledger.during = user_lines()  # in autograd's threads there is no code of the user
        if not call.trains:
            return
        self.ledger.judged["every-chunk-steps"] += 1
        left = [chunk for chunk in call.chunks if chunk in self._waiting]
        if left and any(chunk in self._stepped and chunk not in left for chunk in call.chunks):
            names = [pair for chunk in left for pair in chunk.module.named_parameters()]
            what = f"{describe([parameter for _, parameter in names], names)} had gradients and were not stepped"
            self.ledger.report("every-chunk-steps", "left", f"{what}, as other chunks of their model were")
        elif any(state.dropped for chunk in left if chunk in self._passed_over for state in states_of(chunk)):
            what = "the model had gradients that were dropped, and an optimizer has stepped what had none"
            self.ledger.report("every-chunk-steps", "model", what)

    def end_call(self, call: Call) -> None:
        if call.trains and call.has_returned:
            self._waiting.update(chunk for chunk in call.chunks if getattr(chunk, "param_to_bucket_group", None))

    def begin_step(self, step: Step) -> None:
        """Note where the step is made, and chunks that wait while an optimizer steps untrained ones."""
        self.ledger.during = user_lines()
        if self.ledger.place is None:
            self.ledger.place = place()  # at the end of a process nobody may know it
        if step.has_gradients or any(chunk in self._waiting or chunk in self._stepped for chunk in step.chunks):
            return
        states = [state for chunk in step.chunks for state in states_of(chunk)]
        if states and all(map(is_zero, states)):  # else they were written by hand, or there are no buckets
            self._passed_over.update(self._waiting.difference(self._stepped))

    def end_step(self, step: Step) -> None:
        self._stepped.update(chunk for chunk in step.chunks if chunk in self._waiting)
        self._waiting.difference_update(step.chunks)
        self._passed_over.difference_update(step.chunks)
        # A job that is killed, or ends in os._exit(), leaves no report at its end: leave one after 1, 2, 4, 8
        # steps and so on, and now and then.
        now, count = time.monotonic(), self.ledger.step
        if count & (count - 1) == 0 or (self.audit.is_due() and now - self._left_report >= _APART):
            self._left_report = now
            self.ledger.changed()

    def interrupted(self, chunks: list[Any]) -> None:
        error = sys.exc_info()[0]
        self.ledger.happened("exception", error.__name__ if error else "")


def _weakly(function: Any) -> Any:
    """Return what equals only that of the same function, and keeps nothing: the function may be of a chunk."""
    if function is None:
        return None
    try:
        return (weakref.WeakMethod if isinstance(function, MethodType) else weakref.ref)(function)
    except TypeError:  # of a type that has no weak references
        return id(function)


def _snapshot(chunks: list[Any], functions: list[str]) -> dict[str, Any]:
    config, found = chunks[0].config, {}
    for name in functions:
        value = getattr(config, name, None)
        found[f"config.{name}"] = [*map(_weakly, value)] if isinstance(value, list) else _weakly(value)
    for name, timer in getattr(getattr(config, "timers", None), "_timers", {}).items():
        if getattr(timer, "_started", False):  # a call makes those that it needs
            found[f"the timer {name}"] = True
    for number, chunk in enumerate(chunks):
        found[f"the forward pre-hooks of chunk {number}"] = bool(
            getattr(chunk, "remove_forward_pre_hook_handles", None)
        )
        # no_sync() sets all alike, and there may be thousands.
        groups = evenly_of((chunk.bucket_groups, chunk.expert_parallel_bucket_groups))
        found[f"no_sync() of chunk {number}"] = [group.is_last_microbatch for group in groups]
    return found
