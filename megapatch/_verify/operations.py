"""Records what code asks of process groups, and where it waits for a tensor's value."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

HOST_READ = "aten::_local_scalar_dense"  # .item(), float(), bool(), tolist(): a GPU's queue would have to be empty


class Operations(TorchDispatchMode):  # type: ignore[misc]  # torch is not looked at
    """Lists the collectives, messages and host reads of this thread, in order: (name, ranks, shapes).

    The ranks are those of the process group; a host read has none. Collectives pass torch's dispatcher as
    operators of the namespace c10d (seen in torch 2.13). A backward pass on CPU runs in the thread that begins it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[int, ...] | None, tuple[tuple[int, ...], ...]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        if name.startswith("c10d::") or name == HOST_READ:
            leaves, _ = tree_flatten((args, kwargs))
            shapes = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
            self.found.append((name, next(map(_ranks, filter(_is_group, leaves)), None), shapes))
        return function(*args, **(kwargs or {}))


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and value._type().name() == "ProcessGroup"


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(torch.distributed.get_process_group_ranks(torch.distributed.ProcessGroup.unbox(group)))
