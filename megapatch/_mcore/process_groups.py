"""The process groups of a model-parallel layout, which Megatron creates and leaves behind."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

PARALLEL_STATE = "megatron.core.parallel_state"


def process_groups() -> list[Any]:
    """Return all process groups that this rank is in, the default one included, from the oldest on."""
    from torch.distributed import distributed_c10d

    # Private, and the only list of all process groups: torch 1.13 to 2.15.
    return list(distributed_c10d._world.pg_map)


def destroy_unused(groups: list[Any]) -> int:
    """Destroy the process groups that no rank refers to any more; return their number on this rank.

    The others stay in the list. A collective over the default group, which every rank has to call: none is
    destroyed while another rank still communicates in it. Only torch, Megatron's parallel_state and this list may
    refer to a group.
    """
    import torch

    gc.collect()  # a model's hooks refer to it, and it to its groups
    there = {id(group) for group in process_groups()}
    groups[:] = [group for group in groups if id(group) in there]  # somebody may have destroyed some
    used: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(used, _names_of_used(groups))
    kept = {name for of_rank in used for name in of_rank}
    before = len(groups)
    unused = [group for group in groups if group.group_name not in kept]
    groups[:] = [group for group in groups if group.group_name in kept]
    while unused:
        torch.distributed.destroy_process_group(unused.pop())
    return before - len(groups)


def _names_of_used(groups: list[Any]) -> list[str]:
    # References are counted, as garbage collection does not track a dict or a tuple of nothing but groups.
    known = Counter(id(value) for holder in (groups, *_holders()) for value in gc.get_referents(holder))
    places = range(len(groups))  # a variable would be one reference more; getrefcount()'s argument is one
    used = [place for place in places if sys.getrefcount(groups[place]) - 1 > known[id(groups[place])]]
    return [groups[place].group_name for place in used]


def _holders() -> Iterator[Any]:
    """Yield the containers in which torch and Megatron keep groups; older Megatrons keep destroyed ones."""
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    for table in (getattr(world, name) for name in dir(world) if name.startswith(("pg_", "tags_"))):
        if isinstance(table, dict):
            yield table
            yield from (value for value in table.values() if isinstance(value, list))
    state = vars(sys.modules[PARALLEL_STATE])
    yield state
    yield from (value for value in state.values() if isinstance(value, list))
