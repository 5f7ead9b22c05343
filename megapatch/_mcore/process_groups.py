"""The process groups of a model-parallel layout, which Megatron creates and leaves behind."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .._ranks import default_store

PARALLEL_STATE = "megatron.core.parallel_state"


def process_groups() -> list[Any]:
    """Return all process groups that this rank is in, the default one included, from the oldest on."""
    from torch.distributed import distributed_c10d

    # Private, and the only list of all process groups: torch 1.13 to 2.15.
    return list(distributed_c10d._world.pg_map)


class Noted:
    """A place that ranks come to, and whether all of them have, as far as can be known without waiting.

    A rank's own history must not decide whether it enters a collective: it may have imported megapatch later than
    others. Ranks count themselves in the default group's store. The first one that asks whether all have come
    answers for all that have: a rank that is late is not waited for, and still does the same as the others.

    Attributes:
        place: its name, the same on all ranks; once for a default group.
    """

    def __init__(self, place: str) -> None:
        self.place, self._store = place, default_store()
        self._store.add(f"megapatch/{place}", 1)

    def by_all(self) -> bool:
        """Return whether all ranks have come here; the same on each that has."""
        import torch

        name = f"megapatch/{self.place}"
        if self._store.add(f"{name}/asked", 1) == 1:
            came = self._store.add(name, 0)
            self._store.set(f"{name}/all", str(int(came == torch.distributed.get_world_size())))
        return bool(int(self._store.get(f"{name}/all")))


def groups_made() -> int:
    """Return the number of process groups made so far, on all ranks alike, whether they are in them or not."""
    from torch.distributed import distributed_c10d

    return int(distributed_c10d._world.group_count)  # private; torch 2.1 to 2.15


class Leftovers:
    """Process groups of this rank that nobody needs any more, unless something still refers to one.

    Attributes:
        groups: the groups. Only torch, Megatron's parallel_state and this list refer to one that is not used.
    """

    def __init__(self) -> None:
        self.groups: list[Any] = []

    def destroy(self) -> int:
        """Destroy those that no rank refers to; return their number on this rank.

        A collective over the default group, which every rank has to call: none is destroyed while another rank
        communicates in it, or has it and does not have it among its own.
        """
        import torch

        groups = self.groups
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
            if not name.startswith("tags_"):  # those hold lists alone
                yield table
            yield from (value for value in table.values() if value and isinstance(value, list))
    state = vars(sys.modules[PARALLEL_STATE])
    yield state
    yield from (value for value in state.values() if isinstance(value, list))
