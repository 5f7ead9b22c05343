"""The process groups of a model-parallel layout, which Megatron creates and leaves behind."""

from __future__ import annotations

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
