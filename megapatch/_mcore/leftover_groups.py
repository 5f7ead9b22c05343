"""Destroys the process groups of earlier layouts that nobody needs any more."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .process_groups import PARALLEL_STATE, process_groups


def destroy_unused(groups: list[Any]) -> int:
    """Destroy the groups that no rank refers to, take them from this rank's list, and return their number.

    A collective over the default group, which every rank has to call: none is destroyed while another rank
    communicates in it, or has it and does not have it among its own.

    Args:
        groups: only torch, Megatron's parallel_state and this list refer to one that is not used.
    """
    import torch

    there = {id(group): group.group_name for group in process_groups()[1:]}
    groups[:] = [group for group in groups if id(group) in there]  # somebody may have destroyed some
    used = _used(groups)
    unused = {id(group) for place, group in enumerate(groups) if place not in used}
    of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(
        of_ranks, [name for identity, name in there.items() if identity not in unused]
    )
    kept = {name for of_rank in of_ranks for name in of_rank}
    before = len(groups)
    going = [group for group in groups if group.group_name not in kept]
    groups[:] = [group for group in groups if group.group_name in kept]
    while going:
        torch.distributed.destroy_process_group(going.pop())
    return before - len(groups)


def _used(groups: list[Any]) -> set[int]:
    """Return the places in the list of the groups that something else refers to."""
    # References are counted, as garbage collection does not track a dict or a tuple of nothing but groups.
    known = Counter(id(value) for holder in (groups, *_holders()) for value in gc.get_referents(holder))
    places = range(len(groups))  # a variable would be one reference more; getrefcount()'s argument is one
    return {place for place in places if sys.getrefcount(groups[place]) - 1 > known[id(groups[place])]}


def _holders() -> Iterator[Any]:
    """Yield the containers in which torch and Megatron keep groups; older Megatrons keep destroyed ones.

    Torch keeps an empty list for each group that there has been: those are not looked at.
    """
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    for name in dir(world):
        table = getattr(world, name) if name.startswith(("pg_", "tags_")) else None
        if isinstance(table, dict):
            yield table
            yield from (value for value in table.values() if value and isinstance(value, list))
    state = vars(sys.modules[PARALLEL_STATE])
    yield state
    yield from (value for value in state.values() if isinstance(value, list))
