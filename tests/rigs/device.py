"""A stand-in for a GPU: under the CUDA stubs it lists what would go to one, come back from it, or run on it.

A real device cannot be had on CPU. Copies are listed above the stubs, before they turn "cuda" into the CPU, so
the list is what a GPU would be asked for.
"""

import contextlib
from unittest import mock

import torch

from megapatch._verify.operations import Operation, Operations

# A tensor of Python's numbers, which is copied to the device where it is to be there.
COPIES = ("tensor", "as_tensor")


class Device(Operations):
    """Lists copies to the device, reads from it, and collectives, in order."""

    @property
    def words(self):
        return [_worded(operation) for operation in self.found]

    @contextlib.contextmanager
    def watched(self):
        with self, contextlib.ExitStack() as stack:
            for name in COPIES:
                stack.enter_context(mock.patch.object(torch, name, self._listed(getattr(torch, name))))
            yield self

    def _listed(self, copy):
        def listed_copy(*args, **kwargs):
            self.found.append(Operation(f"copy to {_kind(kwargs.get('device'))}", None, ()))
            return copy(*args, **kwargs)

        return listed_copy


def _worded(operation):
    name, _, shapes = operation
    if name.startswith("copy"):
        return name
    return f"{'read' if operation.is_wait else name.removeprefix('c10d::')} {shapes[-1] if shapes else ()}"


def _kind(device):
    return "the host" if device is None else torch.device(device).type if isinstance(device, str) else device.type
