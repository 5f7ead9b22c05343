"""A GPU for tests, made of CPU torch: what a real one would not forgive, or would wait for, shows on it.

    run_ranks(job, 2, setup=install)     # before Megatron is imported, which keeps functions of torch

devices       tensors know whether they are on the GPU; operations that mix devices raise, as do collectives over
              tensors of the host
streams       work on the GPU is in streams; an operation on memory that another stream may still write to raises
collectives   asynchronous ones, whose outputs are NaN until somebody waits for them
waits         of the host, by line

Unlike a GPU it has one device, no allocator that reuses memory, no graphs, and a backward pass runs in the
stream and the thread that begin it. FSDP2 is not known to it.
"""

from __future__ import annotations

from .collectives import make_collectives_late
from .devices import FakeGPU, MixedDevices, give_devices
from .streams import Race, Stream, current_stream, give_streams

__all__ = ["FakeGPU", "MixedDevices", "Race", "Stream", "current_stream", "gpu", "install"]

gpu = FakeGPU()


def install():
    """Have this process work on the fake GPU from now on. The CUDA stubs are in place."""
    give_devices()
    give_streams()
    make_collectives_late()
    gpu.__enter__()
