"""The parts of a sharded state dict: the leaves that a plan of saving them is made from, and is kept with."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

FLAG = "use_cached_ckpt_structure"
PLANS = ("cached_central_plan", "cached_local_plan")
"""Attributes of a save strategy: whether it keeps plans, and those that it keeps."""
NVRX = "_metadata_cache"
"""NVRx's plans and metadata; None until its writer is used, and absent up to 0.16."""

OBJECT_FIELDS = ("key", "global_shape", "global_offset", "replica_id")
TENSOR_FIELDS = (*OBJECT_FIELDS, "dtype", "local_shape", "axis_fragmentations", "prepend_axis_num")
_FIELDS = (*TENSOR_FIELDS, "flattened_range")


def structure(tree: Any) -> list[tuple[Any, ...]]:
    """Return the facts a plan is made from, leaf by leaf, without any data."""
    return [_getter_of_fields(leaf.__class__)(leaf) for leaf in leaves(tree)]


def leaves(tree: Any) -> Iterator[Any]:
    """Return all that a tree of dicts and lists holds."""
    return (leaf for _, leaf in named_leaves(tree))


def named_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Return all that a tree of dicts and lists holds, with its key in a dict, or "" in a list."""
    branches = [tree]
    for branch in branches:
        items = branch.items() if isinstance(branch, dict) else (("", value) for value in branch)
        for name, value in items:
            if isinstance(value, (dict, list)):
                branches.append(value)
            else:
                yield str(name), value


@functools.cache
def _getter_of_fields(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    known = getattr(kind, "__dataclass_fields__", ())
    return operator.attrgetter("__class__", "__class__", *(name for name in _FIELDS if name in known))
