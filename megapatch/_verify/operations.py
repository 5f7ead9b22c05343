"""Records the operations that code asks of process groups, and the places where the host waits for the device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten

WAITING = {
    "aten::_local_scalar_dense",  # .item(), float(), int(), bool() and formats
    "aten::allclose",
    "aten::bincount",
    "aten::equal",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::_unique2",
}
"""Operators whose result, or its shape, the host needs: a GPU's queue would have to be empty."""
_INDEXED_BY_MASK = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_COPIES = {"aten::_to_copy", "aten::copy_"}
_METHODS = ("cpu", "numpy", "tolist")
"""Methods of tensors that no operator shows where the tensor is on the CPU."""


class Operation(NamedTuple):
    """A collective, a message, or a wait of the host.

    Attributes:
        name: of the operator, or of the method of a tensor.
        ranks: of the process group; None for a wait.
        shapes: of the tensors.
    """

    name: str
    ranks: tuple[int, ...] | None
    shapes: tuple[tuple[int, ...], ...]

    @property
    def is_wait(self) -> bool:
        return not self.name.startswith("c10d::")


class Operations(TorchDispatchMode):  # type: ignore[misc]  # torch is not looked at
    """Lists the operations of this thread, and of autograd's own threads in its backward passes, in order.

    Collectives pass torch's dispatcher as operators of the namespace c10d (seen in torch 2.13). Autograd hands
    this mode on to the threads in which it runs a backward pass on a GPU. Where there is no GPU the CPU stands for
    one: all waits are listed that there would be.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Operation] = []
        self._entered: list[contextlib.ExitStack] = []

    @property
    def waits(self) -> list[Operation]:
        return [operation for operation in self.found if operation.is_wait]

    def __enter__(self) -> Any:
        with contextlib.ExitStack() as stack:
            for name in _METHODS:
                original = getattr(torch.Tensor, name)
                stack.enter_context(mock.patch.object(torch.Tensor, name, self._listing(name, original)))
            self._entered.append(stack.pop_all())
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._entered.pop().close()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function._schema.name, kwargs or {}
        if name.startswith("c10d::"):
            leaves, _ = tree_flatten((args, kwargs))
            self._note(name, leaves, next(map(_ranks, filter(_is_group, leaves)), None))
        elif _waits(name, args, kwargs):
            self._note(name, tree_flatten((args, kwargs))[0])
        return function(*args, **kwargs)

    def _note(self, name: str, leaves: list[Any], ranks: tuple[int, ...] | None = None) -> None:
        shapes = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
        self.found.append(Operation(name, ranks, shapes))

    def _listing(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def listing_method(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            # Not within another operation, nor in a thread of somebody else's.
            if self not in _get_current_dispatch_mode_stack() or not _is_on_device(tensor):
                return method(tensor, *args, **kwargs)
            self._note(f"Tensor.{name}", [tensor])
            length = len(self.found)
            result = method(tensor, *args, **kwargs)
            del self.found[length:]  # the same, as an operator
            return result

        return listing_method


def _waits(name: str, args: Any, kwargs: Any) -> bool:
    if name in WAITING:
        known = name == "aten::repeat_interleave" and kwargs.get("output_size") is not None
        return not known and any(map(_is_on_device, _tensors(args)))
    if name in _INDEXED_BY_MASK:
        return any(map(_is_on_device, _tensors(args))) and _needs_indices_of_mask(*args[1:3])
    if name in _COPIES and torch.cuda.is_available():
        return _comes_to_the_host(name, args, kwargs)
    return False


def _needs_indices_of_mask(indices: Any, value: Any = None) -> bool:
    """Return whether there is a mask among the indices; one that only selects elements to fill needs none."""
    masks = [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]
    fills = value is not None and value.numel() == 1 and value.device.type == "cpu"
    return bool(masks) and not (fills and len(masks) == sum(index is not None for index in indices))


def _comes_to_the_host(name: str, args: Any, kwargs: Any) -> bool:
    if name == "aten::copy_":
        target, source, *rest = args
        to_host, waits = target.device.type == "cpu", not any(rest) and not kwargs.get("non_blocking")
    else:
        (source, *_), device = args, kwargs.get("device")
        to_host, waits = device is not None and torch.device(device).type == "cpu", not kwargs.get("non_blocking")
    return to_host and waits and source.device.type != "cpu"


def _tensors(args: Any) -> Iterator[Any]:
    return (arg for arg in args if isinstance(arg, torch.Tensor))


def _is_on_device(tensor: Any) -> bool:
    return tensor.device.type != "cpu" or not torch.cuda.is_available()


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and value._type().name() == "ProcessGroup"


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(torch.distributed.get_process_group_ranks(torch.distributed.ProcessGroup.unbox(group)))
