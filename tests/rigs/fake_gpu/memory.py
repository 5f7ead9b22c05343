"""The fake GPU's notes on each memory: that it is the GPU's, and which streams may still write to it."""

from __future__ import annotations

from torch.distributed._shard.sharded_tensor import ShardedTensor


class Memory:
    """Noted in a storage of the fake GPU.

    Attributes:
        written: by stream that computes, when it wrote there last.
        flying: what communication and other streams have written: (from byte, to byte, stream, when).
    """

    def __init__(self):
        self.written, self.flying = {}, []


def memory_of(tensor):
    """Return the Memory that a tensor is in, or None for one of the host, and for one that is made of others."""
    if isinstance(tensor, ShardedTensor):
        return None
    return getattr(tensor.untyped_storage(), "_fake_gpu", None)


def put_on_gpu(tensor):
    """Say that a tensor's memory is the GPU's."""
    storage = tensor.untyped_storage()
    if getattr(storage, "_fake_gpu", None) is None:
        storage._fake_gpu = Memory()
    return tensor


def extent(tensor):
    """Return the bytes of its storage that a tensor lies in, from and to."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first, size = tensor.storage_offset(), tensor.element_size()
    return first * size, (first + last + 1) * size
