"""The numbers that a loss is multiplied by, in the loss function or by a hook of the config."""

from __future__ import annotations

import math
from typing import Any

_MOST_NODES = 32


def of_loss(loss: Any) -> list[Any]:
    """Return the tensors of one element that a loss was multiplied by, once it was one number. Waits for nothing.

    They are found in autograd's graph, by private names that torch 2.5 to 2.15 have; without these, none is.
    """
    found: list[Any] = []
    seen: set[Any] = set()
    todo = [getattr(loss, "grad_fn", None)]
    while todo and len(seen) < _MOST_NODES:
        node = todo.pop()
        if node is None or node in seen or not _is_of_one_number(node):
            continue  # below are activations
        seen.add(node)
        if type(node).__name__ == "MulBackward0":
            saved = (getattr(node, name, None) for name in ("_saved_self", "_saved_other"))
            found += [factor for factor in saved if factor is not None and not factor.requires_grad]
        todo += [below for below, _ in node.next_functions]
    return found


def of_hook(config: Any, like: Any) -> list[Any]:
    """Return the number by which ``config.grad_scale_func`` multiplies, asked as Megatron asks it for routers.

    Args:
        like: a tensor on the device of the losses.
    """
    return [] if config.grad_scale_func is None else [config.grad_scale_func(like.new_ones(1))]


def _is_of_one_number(node: Any) -> bool:
    results = getattr(node, "_input_metadata", None)
    return results is not None and all(math.prod(result.shape) == 1 for result in results)
