"""A stand-in for a GPU: under the CUDA stubs it lists what would go to one, come back from it, or run on it.

A real device cannot be had on CPU. What is listed is asked for above the stubs, before they turn "cuda" into the
CPU, so it is what a GPU would be asked for.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from megapatch._verify.operations import HOST_READ, Operations

# What makes the host wait until the device has a value, and copies it.
READS = {torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.nonzero}
# A tensor of Python's numbers, which is copied to the device where it is to be there.
COPIES = ("tensor", "as_tensor")


class Device(TorchFunctionMode):
    """Lists copies to the device, reads from it, and collectives, in order, as words."""

    def __init__(self):
        super().__init__()
        self.found = []
        self._below = _Below(self.found)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in READS:
            self.found.append(f"read {tuple(args[0].shape)}")
            length = len(self.found)
            result = function(*args, **kwargs)
            del self.found[length:]  # the same, as seen below
            return result
        return function(*args, **kwargs)

    @contextlib.contextmanager
    def watched(self):
        with self._below, self, contextlib.ExitStack() as stack:
            for name in COPIES:
                stack.enter_context(mock.patch.object(torch, name, self._listed(getattr(torch, name))))
            yield self

    def _listed(self, copy):
        def listed_copy(*args, **kwargs):
            self.found.append(f"copy to {_kind(kwargs.get('device'))}")
            return copy(*args, **kwargs)

        return listed_copy


class _Below(Operations):
    """Words each operation as torch's dispatcher sees it."""

    def __init__(self, words):
        super().__init__()
        self._words = words

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        for name, _, shapes in self.found:
            shape = shapes[-1] if shapes else ()
            self._words.append(f"read {shape}" if name == HOST_READ else f"{name.removeprefix('c10d::')} {shape}")
        self.found.clear()
        return result


def _kind(device):
    return "the host" if device is None else torch.device(device).type if isinstance(device, str) else device.type
