"""A step in which some parameters get no gradient is reduced in full, in the same order on every rank.

Symptom   with overlap_grad_reduce a bucket group is reduced once all its parameters have a gradient. If one gets
          none in a step (a vision tower on text, a value head, a multi-token prediction layer, an unused expert),
          the step ends with "Communication call has not been issued for this bucket"; from 0.16 on the first such
          step ends with a bare assertion in reset().
          With several instances of the distributed optimizer, up to 0.15 and later in a run, the group is never
          reduced, silently. Where ranks use different parameters, their collectives no longer match.
Upstream  NVIDIA/Megatron-LM#1150 (open since 2024), #5643; 0.12 to 0.19 and main.
Seam      start_grad_sync() of bucket groups: one that a backward pass starts waits until those before it have
          started, in one order for all ranks: that of the backward pass, by the model's order of parameters. One
          that is started or finished by hand is reduced then and there. A reduce that has
          not started when DistributedDataParallel.finish_grad_sync() is called is started there, in that order, by
          Megatron's own method. zero_grad_buffer() lets a group that has seen only some of its parameters learn
          again in the next step. Starting the group at the end is not enough: the groups after it would have
          started before it on this rank, and after it on a rank that had all gradients.
          A reduce that an abandoned step has left under way is dropped there with its gradients: the next step
          would take it for its own, and fail.
Limits    all ranks still have to call finish_grad_sync() in the same steps. A group that waits holds up the
          overlap of those after it: set requires_grad to False, alike on all ranks, for parameters that are never
          trained.
          Chunks of virtual stages are put in order by config.no_sync_func, as Megatron's train() sets it; without
          it, and in a first step that no zero_grad_buffer() precedes, each chunk has an order of its own.
          With overlap_param_gather a module that is not called at all is left to Megatron, which asserts at its
          next gather: call it, on anything, and do not use the result.
          Only TrainStep and the patched train() functions know that a step was given up. In other loops three
          things of it stay: tokens that routers have counted, for the next step's expert bias and global auxiliary
          loss; losses that wait to be logged; and the expert bias, if finalize has moved it.
Numbers   change where a bucket was silently not reduced, to those of a run without overlap.
Cost      about 4 us a bucket group and step. Nothing in a forward pass, nothing per parameter.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ..._mcore.bucket_groups import (
    DDP,
    GROUP,
    LINES,
    begin_lines,
    forget_first_step,
    lines_of,
    settle_grad_reduces,
)
from ..._mcore.side_table import SideTable
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict
from .._diagnosis import expect_none, resolve, running, unmet
from ._stand_ins import FINISH, events_of_step

MODULE = "megatron.core.distributed"

_chunks_in_line = SideTable()
"""By chunk: with how many chunks, itself included, its bucket groups share their lines."""


def diagnose(module: ModuleType) -> Verdict:
    """Run the real bucket group's methods with a parameter that gets no gradient, on a stand-in."""
    expect_none(
        *unmet.names(f"{GROUP}.__init__", "params", "grad_reduce_handle"),
        *unmet.names(f"{GROUP}.register_grad_ready", "start_grad_sync"),
        *unmet.names(f"{DDP}.__init__", "bucket_groups", "expert_parallel_bucket_groups"),
        *unmet.names(f"{DDP}.finish_grad_sync", "bucket_groups", "finish_grad_sync"),
        *unmet.names(f"{DDP}.zero_grad_buffer", "bucket_groups", "reset"),
    )
    group = resolve(GROUP)
    with running("the bucket group's methods"):
        usual, unused = events_of_step(group, 1, 1), events_of_step(group, 1, 1, unused=True)
    if usual != ["pass 1"]:
        return Verdict(
            UNKNOWN, f"expected a bucket group to be reduced in the backward pass; found {usual or 'no reduce'}"
        )
    if unused == [FINISH]:
        return Verdict(FIXED, "a bucket group that lacks a gradient is reduced at the end of the step")
    if len(unused) == 1 and unused[0].endswith("Error"):
        return Verdict(
            NEEDED, "a bucket group that lacks a gradient is not reduced, and the step ends with an error"
        )
    return Verdict(UNKNOWN, f"expected a bucket group that lacks a gradient not to be reduced; found {unused}")


class Line:
    """The bucket groups that share a communicator, in the order in which every rank reduces them.

    It refers to them weakly, as it is kept for as long as they are.
    """

    def __init__(self, groups: list[Any]) -> None:
        self.groups = [weakref.ref(group) for group in groups]
        self.places = {id(group): place for place, group in enumerate(groups)}
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self.next = 0
        self.started: set[int] = set()
        self.finished: set[int] = set()
        self.waiting: dict[int, Callable[[Any], Any]] = {}

    def start(self, group: Any, start: Callable[[Any], Any]) -> None:
        """Start the reduce of a group now, or, in a backward pass, as soon as those before it have started."""
        key = id(group)
        if key in self.finished and self.finished == self.started:
            self.begin()  # gradients may be zeroed by hand, or not at all
        if key in self.started:
            # finish_grad_sync() starts a group that is in its first step once more, which has no effect except
            # with several instances of the distributed optimizer, where nothing remembers the first start.
            if key in self.finished or not getattr(group, "is_first_batch", False):
                start(group)
            return
        self.waiting[key] = start
        if self.places[key] < self.next or not _in_backward_pass():
            self._start(group)
        while self.next < len(self.groups) and self._may_pass(self.groups[self.next]()):
            self.next += 1
        if key in self.waiting:
            self.waiting[key] = _after_this_stream(start)

    def _may_pass(self, group: Any) -> bool:
        if group is None:  # its chunk is gone
            return True
        if id(group) in self.waiting:
            self._start(group)
        # A frozen parameter never gets a gradient, on any rank: its group is left to the end of the step.
        return id(group) in self.started or _is_partly_frozen(group)

    def _start(self, group: Any) -> None:
        self.started.add(id(group))
        self.waiting.pop(id(group))(group)

    @contextlib.contextmanager
    def finishing(self, group: Any) -> Iterator[None]:
        """Start a group that waits, as its owner may reduce it by hand, and note that it is finished."""
        if id(group) in self.waiting:
            self._start(group)
        yield
        self.finished |= {id(group)} & self.started

    def start_all(self, arguments: dict[str, Any]) -> None:
        """Start all groups that have not started: in their order, those with frozen parameters last."""
        groups = [group for reference in self.groups if (group := reference()) is not None]
        left = [group for group in groups if id(group) not in self.started]
        for group in sorted(left, key=_is_partly_frozen):
            if id(group) not in self.started:  # it may have waited for one that has started here
                group.start_grad_sync(**arguments)


def _in_backward_pass() -> bool:
    """Return whether autograd calls, whose hooks start a group in another order on each rank."""
    return bool(sys.modules["torch"]._C._current_graph_task_id() != -1)  # private; torch 2.1 to 2.15


def _after_this_stream(start: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that starts a reduce, on any stream, after this stream's work so far."""
    import torch

    if not torch.cuda.is_initialized():
        return start
    event = torch.cuda.current_stream().record_event()

    def start_later(group: Any) -> Any:
        torch.cuda.current_stream().wait_event(event)
        return start(group)

    return start_later


def start_in_line(start_grad_sync: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start_grad_sync)
    def patched_start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        line = LINES.get(self)
        if line is None or not self.ddp_config.overlap_grad_reduce:
            return start_grad_sync(self, *args, **kwargs)
        return line.start(self, lambda group: start_grad_sync(group, *args, **kwargs))

    return patched_start_grad_sync


def finish_in_line(finish_grad_sync: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(finish_grad_sync)
    def patched_finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        line = LINES.get(self)
        if line is None or not self.ddp_config.overlap_grad_reduce:
            return finish_grad_sync(self, *args, **kwargs)
        with line.finishing(self):
            return finish_grad_sync(self, *args, **kwargs)

    return patched_finish_grad_sync


def start_all_at_the_end(finish_grad_sync: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(finish_grad_sync)
    def patched_finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.ddp_config.overlap_grad_reduce:
            force = kwargs.get("force_all_reduce", args[0] if args else False)  # from 0.16 on
            for line in lines_of(self):
                if len(line.started) < len(line.groups):
                    line.start_all({"force_all_reduce": force} if force else {})
        return finish_grad_sync(self, *args, **kwargs)

    return patched_finish_grad_sync


def line_up_at_birth(init: Callable[..., None]) -> Callable[..., None]:
    """Line up for a first step without zero_grad_buffer(): ROLL and others zero gradients at the end of a step.

    Up to 0.15 such a step would fail. From 0.16 on the first step starts no reduce before its end, in any case.
    """

    @functools.wraps(init)
    def patched_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.ddp_config.overlap_grad_reduce:
            _line_up(self)

    return patched_init


def begin_in_line(zero_grad_buffer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(zero_grad_buffer)
    def patched_zero_grad_buffer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.ddp_config.overlap_grad_reduce:
            settle_grad_reduces(self)
            _line_up(self)
            begin_lines(self)
            forget_first_step(self, if_partly_seen=True)
        return zero_grad_buffer(self, *args, **kwargs)

    return patched_zero_grad_buffer


def _line_up(ddp: Any) -> None:
    chunks = _chunks_of_model(ddp)
    if _chunks_in_line.get(ddp) == len(chunks):
        return
    for kind in ("bucket_groups", "expert_parallel_bucket_groups"):  # they reduce over other process groups
        # The last virtual stage is the first in the backward pass.
        groups = [group for chunk in reversed(chunks) for group in _as_in_backward(chunk, kind)]
        line = Line(groups)
        for group in groups:
            LINES.set(group, line)
    for chunk in chunks:
        _chunks_in_line.set(chunk, len(chunks))


def _chunks_of_model(ddp: Any) -> list[Any]:
    no_sync = ddp.config.no_sync_func
    chunks = [getattr(function, "__self__", None) for function in no_sync] if isinstance(no_sync, list) else []
    return chunks if ddp in chunks and all(isinstance(chunk, type(ddp)) for chunk in chunks) else [ddp]


def _as_in_backward(ddp: Any, kind: str) -> list[Any]:
    """Sort bucket groups by when their last gradient comes if parameters are used in the order of the model."""
    order = {param: index for index, param in enumerate(ddp.module.parameters())}
    return sorted(getattr(ddp, kind), key=lambda group: -min(order[param] for param in group.params))


def _is_partly_frozen(group: Any) -> bool:
    return not all(param.requires_grad for param in group.params)


PATCH = Patch(
    name="megatron.parameters-without-gradients",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/issues/1150",
    sites=(
        Site(
            MODULE,
            diagnose,
            replace={
                "param_and_grad_buffer._ParamAndGradBucketGroup.start_grad_sync": start_in_line,
                "param_and_grad_buffer._ParamAndGradBucketGroup.finish_grad_sync": finish_in_line,
                "distributed_data_parallel.DistributedDataParallel.__init__": line_up_at_birth,
                "distributed_data_parallel.DistributedDataParallel.finish_grad_sync": start_all_at_the_end,
                "distributed_data_parallel.DistributedDataParallel.zero_grad_buffer": begin_in_line,
            },
        ),
    ),
    changes_numbers=True,
)
