"""Meetings of ranks in torch.distributed's store, before a collective for which all have to come."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_VOID = 2**62
LATE = timedelta(seconds=30)
"""After this time somebody should hear of it that the others have not come."""


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
