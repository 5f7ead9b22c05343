"""hooks-balanced: a forward-backward call leaves hooks and flags as it found them; all parts see it.

Watches   the three functions that get_forward_backward_func() returns, and should_run_forward_backward() of the
          rerun machine, in all releases. A call that was interrupted, or a no_sync() that was entered twice,
          leaves hooks or flags behind, and the next call reduces gradients in every microbatch, or in none; or
          the machine is still inside the step that an exception ended, and takes the next step for its end. It
          is judged as the next call begins: until then, the code that caught the exception may have put it
          right.
Limits    the model config's hooks and timers, no_sync() and forward pre-hooks of the chunks, and the state of
          the rerun machine; not the state that a trainer keeps itself.
Cost      some microseconds a call.
"""

from __future__ import annotations

import weakref
from types import MethodType
from typing import Any

from .._mcore.bucket_groups import chunks_of
from .._mcore.rerun_machine import BEFORE_STEP, MODULE, machine_of_this_process
from .._mcore.side_table import SideTable
from ..patch import Site
from ._audit import Audit, Call, Part
from ._findings import observes, user_code
from ._samples import evenly_of
from ._watching import RAISED, around, before, site

SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)

_NOTHING = object()


class Calls(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._left = SideTable()
        """About a model's first chunk: by name, the changes that a call that raised has left behind, and where."""
        self._functions = SideTable()
        """About a config: the names of those of its hundreds of fields that are for functions."""
        self.interrupted_machines: weakref.WeakSet[Any] = weakref.WeakSet()
        """Rerun machines that were inside a step when a call raised."""

    def sites(self) -> tuple[Site, ...]:
        return (
            site(
                "megatron.core.pipeline_parallel.schedules",
                dict.fromkeys(SCHEDULES, around(self._begin, self._end)),
            ),
            site(MODULE, {"RerunStateMachine.should_run_forward_backward": before(self._judge_machine)}),
        )

    def _begin(self, *_: Any, **options: Any) -> tuple[Call, dict[str, Any] | None] | None:
        chunks = chunks_of(options.get("model"))
        if not chunks:
            return None
        call = Call(chunks, trains=not options.get("forward_only"))
        self._show_beginning(call)
        return call, self._look(chunks)

    def _end(self, begun: tuple[Call, dict[str, Any] | None] | None, result: Any, *_: Any, **__: Any) -> None:
        if begun is not None:
            call, before = begun
            call.has_returned = result is not RAISED
            self._compare(call, before)
            self._show_end(call)

    @observes
    def _show_beginning(self, call: Call) -> None:
        self.ledger.judged["hooks-balanced"] += 1
        self.audit.models.add(call.chunks)
        for part in self.audit.parts:
            part.begin_call(call)

    @observes
    def _show_end(self, call: Call) -> None:
        self.audit.may_have_broken |= not (call.trains and call.has_returned)
        if not call.trains:
            self.ledger.happened("forward-only")
        for part in self.audit.parts:
            part.end_call(call)
            if not call.has_returned:
                part.interrupted(call.chunks)

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

    # ------------------------------------------------------------------------ the rerun machine
    @observes
    def _judge_machine(self, machine: Any, *_: Any, **__: Any) -> None:
        if not self.interrupted_machines:
            return
        if machine in self.interrupted_machines and machine.state.name in BEFORE_STEP:
            self.ledger.report(
                "hooks-balanced",
                "machine",
                f"the rerun machine is still {machine.state.name}, in a step that an exception has ended, and "
                "takes the step that begins for its end",
            )
        self.interrupted_machines.discard(machine)


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
