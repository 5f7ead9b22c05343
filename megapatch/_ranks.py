"""This process's rank, the number of ranks, ranks in words, and their meetings in a store before a collective."""

from __future__ import annotations

import contextlib
import os
import sys
from array import array
from collections.abc import Callable
from datetime import timedelta
from typing import Any

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
"""Variables of launchers; Slurm's last, as all ranks that mpirun starts inherit those of their batch script."""
_VOID = 2**62
LATE = timedelta(seconds=30)
"""After this time somebody should hear of it that the others have not come."""
_MOST_RUNS = 16
"""Of numbers: every other one of 131,072 ranks would be 468,737 characters."""


def place() -> tuple[int, int, bool]:
    """Return this rank, the number of ranks, and whether torch.distributed says so, or else a launcher."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), True
    return _variable(0, *RANKS), _variable(1, *_SIZES), False


def _variable(otherwise: int, *names: str) -> int:
    return next((int(text) for name in names if (text := os.environ.get(name, "")).isdecimal()), otherwise)


def default_store() -> Any:
    """Return the store in which the ranks of torch.distributed have met."""
    from torch.distributed import distributed_c10d

    # Private, and the only way to the store of every kind of start: torch 2.1 to 2.15.
    return distributed_c10d._get_default_store()


def numbered(noun: str, numbers: list[int]) -> str:
    """Return numbers in words: ``rank 3``, or ``ranks 0-2, 5``; of many runs the first, and how many more."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:_MOST_RUNS])
    others = sum(last - first + 1 for first, last in runs[_MOST_RUNS:])
    more = f" and {others} more" if others else ""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {words}{more}"


# ------------------------------------------------------------------------ meetings
def meet(
    store: Any,
    name: str,
    size: int,
    number: int,
    patience: timedelta,
    on_late: Callable[[timedelta], object] | None = None,
) -> bool:
    """Return whether all ranks have come to a meeting. The counter alone decides, so that a yes is one for all.

    Two or three operations a rank: each adds to a counter, and the last to come writes a key for which the others
    wait. The key says only that the counter is worth looking at: where writing or deleting it fails, the others
    find it full when their patience ends.

    Args:
        store: of torch.distributed.
        name: of these meetings, the same on all ranks.
        size: how many ranks meet.
        number: how often they have met by this name, with this meeting.
        patience: how long to wait for the others.
        on_late: called with the rest of the patience, once, where they have not come after `LATE`.
    """
    counter, full, key = f"{name}/come", size * number, f"{name}/{number}"
    come = store.add(counter, 1)
    if come == full:
        with contextlib.suppress(Exception):
            store.set(key, "yes")
            store.delete_key(f"{name}/{number - 1}")  # everybody has left it: the store does not grow
        return True
    if come >= _VOID:
        return False
    if on_late is not None and patience > LATE:
        if _comes(store, key, LATE):
            return True
        patience -= LATE
        on_late(patience)
    return _comes(store, key, patience) or _were_all_there(store, counter, full)


def _comes(store: Any, key: str, patience: timedelta) -> bool:
    try:
        store.wait([key], patience)
    except Exception:  # torch has had several kinds for a store's timeout
        return False
    return True


def _were_all_there(store: Any, counter: str, full: int) -> bool:
    """Return whether a counter is full. If it is not, make it void: nobody who comes later finds it full."""
    while (come := store.add(counter, 0)) < full:
        store.compare_set(counter, str(come), str(come + _VOID))  # unless somebody has come meanwhile
    return bool(come < _VOID)


def name_of(ranks: list[int]) -> str:
    """Return a short name of a process group for keys in the store, the same on all of its ranks."""
    import hashlib  # a millisecond, which few processes have to pay

    # As an array: text takes twice as long, 6 ms for 131,072 ranks.
    return hashlib.blake2b(array("q", ranks).tobytes(), digest_size=8).hexdigest()
