"""Asynchronous collectives whose results are there when they are waited for, and not before.

gloo with one worker thread ends the collectives of a group in order, mostly before anybody looks: waiting for the
last handle of several would do. Here every result stays NaN until its own handle is waited for. A handle that is
dropped instead has its result written when the next collective begins, as a reduce that nobody waits for would do.

    run_ranks(job, 2, setup=make_collectives_late)     # before Megatron is imported, which keeps these functions

On the fake GPU a collective is in a stream of its group, for which the stream that waits for its handle waits.
"""

from __future__ import annotations

import contextlib

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import streams
from .devices import check_collective, is_of_host
from .memory import memory_of

ASYNCHRONOUS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")

_dropped = []  # results that nobody has waited for, with where they go
_open = []  # the coalescing managers that are open, each the list of its handles


class Late:
    """The handle of one collective. Its result is in `result` until `wait()` moves it into `output`."""

    def __init__(self, work, output, result):
        self.parts = work, output, result
        self.flight = streams.launch(output)

    def wait(self, *_):
        if self.parts is not None:
            _land(self.parts)
            self.parts = None
        if self.flight is not None:
            streams.join(*self.flight)
        return True

    def __del__(self):
        if self.parts is not None:
            _dropped.append(self.parts)


def _land(parts):
    work, output, result = parts
    work.wait()
    with torch.no_grad(), _disable_current_modes():
        output.copy_(result)


class LateTogether:
    """The handle of what a coalescing manager has begun."""

    def __init__(self, handles):
        self.handles = handles

    def wait(self):
        for handle in self.handles:
            handle.wait()


def make_collectives_late():
    """Replace torch's functions, and its coalescing manager, in this process."""
    from torch.distributed import distributed_c10d

    for name in ASYNCHRONOUS:
        replaced = _late(getattr(torch.distributed, name))
        for module in (torch.distributed, distributed_c10d):
            setattr(module, name, replaced)
    torch.distributed._coalescing_manager = distributed_c10d._coalescing_manager = _coalesced


def _late(original):
    def collective(output, *args, async_op=False, **kwargs):
        for parts in [_dropped.pop() for _ in range(len(_dropped))]:
            _land(parts)
        if not async_op and not _open:
            return original(output, *args, **kwargs)
        tensors = [value for value in (output, *args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        _look(original.__name__, tensors, kwargs.get("group"))
        with _disable_current_modes():
            result = output.detach().clone()
            inputs = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
            if "input" in kwargs:
                kwargs["input"] = kwargs["input"].clone()
            work = original(result, *inputs, async_op=True, **kwargs)
        handle = Late(work, output, result)
        with torch.no_grad(), _disable_current_modes():
            output.fill_(torch.nan if output.is_floating_point() else 0)
        if _open:
            _open[-1].append(handle)
        return handle

    return collective


def _look(name, tensors, group):
    on_gpu = [tensor for tensor in tensors if memory_of(tensor) is not None]
    if streams.are_given() and not is_of_host(group):
        check_collective(name, tensors)
    streams.look(on_gpu, [], name)


@contextlib.contextmanager
def _coalesced(group=None, device=None, async_ops=False):
    handles = []
    _open.append(handles)
    together = LateTogether(handles)
    try:
        yield together
    finally:
        _open.pop()
    if not async_ops:
        together.wait()
