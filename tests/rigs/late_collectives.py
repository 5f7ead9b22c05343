"""Asynchronous collectives whose results are there when they are waited for, and not before.

gloo with one worker thread ends the collectives of a group in order, mostly before anybody looks: waiting for the
last handle of several would do. Here every result stays NaN until its own handle is waited for. A handle that is
dropped instead has its result written when the next collective begins, as a reduce that nobody waits for would do.

    run_ranks(job, 2, setup=make_collectives_late)     # before Megatron is imported, which keeps these functions
"""

from __future__ import annotations

import contextlib

import torch

ASYNCHRONOUS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")

_dropped = []  # results that nobody has waited for, with where they go
_open = []  # the coalescing managers that are open, each the list of its handles


class Late:
    """The handle of one collective. Its result is in `result` until `wait()` moves it into `output`."""

    def __init__(self, work, output, result):
        self.parts = work, output, result

    def wait(self, *_):
        if self.parts is not None:
            _land(self.parts)
            self.parts = None
        return True

    def __del__(self):
        if self.parts is not None:
            _dropped.append(self.parts)


def _land(parts):
    work, output, result = parts
    work.wait()
    with torch.no_grad():
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
        result = output.detach().clone()
        inputs = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        if "input" in kwargs:
            kwargs["input"] = kwargs["input"].clone()
        handle = Late(original(result, *inputs, async_op=True, **kwargs), output, result)
        with torch.no_grad():
            output.fill_(torch.nan if output.is_floating_point() else 0)
        if _open:
            _open[-1].append(handle)
        return handle

    return collective


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
