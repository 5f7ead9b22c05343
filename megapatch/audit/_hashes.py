"""Hashes of parameters, made where the parameters are, without a sync."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

WIDTHS = (1024, 1021)
"""Of columns in which bytes are added up: hardly any two places share a column of both."""
_SMALL = 2**16
"""Bytes: a tensor of at most this size is hashed together with others."""
_ODD = 0x1E3779B97F4A7C15
_QUANTIZED = ("_data", "_rowwise_data")
"""Attributes with the bytes of Transformer Engine's fp8 and fp4 weights, which have no memory of their own."""
_SCALE = "_scale_inv"
"""That with their scale, if there is one for the whole tensor. Scales by block are left out: they are padded with
whatever was in memory, and bytes of other weights differ anyhow."""


def stored(tensor: Any) -> list[Any]:
    """Return the tensors whose memory a parameter is in: itself, or what it consists of; none if nobody knows."""
    import torch

    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return [tensor]
    parts = [getattr(tensor, name, None) for name in (*_QUANTIZED, _SCALE)]
    found = [part for part in parts if isinstance(part, torch.Tensor)]
    try:
        tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a wrapper's storage is not there
        return found
    return found or [tensor]


def hash_of(parameters: Iterable[Any], widths: tuple[int, ...] = WIDTHS) -> Any:
    """Return two numbers, of 16 bytes together, that depend on every bit and its place, and on all shapes.

    Parameters are read once for each width. By a single one, words that change places in a column are not seen.
    """
    import torch

    listed = [part.detach() for parameter in parameters for part in stored(parameter)]
    sums = torch.cat([part for memory in _joined(listed) for part in _sums(memory, widths)])
    places = torch.arange(1, 2 * len(sums), 2, device=sums.device).mul_(_ODD)  # odd, with little in common
    mixed = _mix(sums.add_(places))
    numbers = torch.stack([mixed.sum(), mixed.mul_(places).sum()])
    return numbers + zlib.crc32(repr([(tensor.shape, tensor.dtype) for tensor in listed]).encode())


def _joined(tensors: list[Any]) -> Iterator[Any]:
    """Yield the memory of each tensor, as bytes; small ones together, as a sum costs more than to copy them."""
    import torch

    small: list[Any] = []
    size = 0
    for tensor in tensors:
        memory = tensor.contiguous().view(-1).view(torch.uint8)
        if memory.numel() > _SMALL:
            yield memory
            continue
        small.append(memory)
        size += memory.numel()
        if size > _SMALL:
            yield torch.cat(small)
            small, size = [], 0
    if small:
        yield torch.cat(small)


def _mix(numbers: Any) -> Any:
    """Mix high and low bits; injective."""
    for _ in range(2):
        numbers.bitwise_xor_((numbers >> 32).bitwise_and_(0xFFFFFFFF)).mul_(_ODD)
    return numbers


def _sums(memory: Any, widths: tuple[int, ...]) -> Iterator[Any]:
    """Add up bytes in columns, once by each width."""
    import torch

    if memory.data_ptr() % 8:
        memory = memory.clone()
    whole = memory.numel() // 8 * 8
    words = memory[:whole].view(torch.int64)  # added up many times faster than any others
    for width in widths:
        rows = words.numel() // width * width
        yield words[:rows].view(-1, width).sum(0)
        yield words[rows:]
    yield memory[whole:].long()
