"""Settle, before each of the audit's collectives, that every rank makes it.

A rank without the audit, with other settings, or that has skipped an optimizer step would leave the others
waiting for ever, or take the audit's collective for one of Megatron's. So ranks meet in the store that
torch.distributed was initialized with, and wait there for at most `_PATIENCE`; where somebody does not come, none
of them makes the collective, and that group of ranks is not compared again.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import weakref
from collections import Counter
from datetime import timedelta
from typing import Any

log = logging.getLogger("megapatch")

_PATIENCE = timedelta(seconds=120)
_numbers = itertools.count(1)
"""Of the worlds of this process: a store may outlive the world that it was made for, with all its keys."""
_YES, _NO = "yes", "no"


class _World:
    """What the ranks of torch.distributed's default process group have settled."""

    def __init__(self, default: Any) -> None:
        self.default = weakref.ref(default)
        self.prefix = f"megapatch.audit/{next(_numbers)}"
        self.all_are_audited = False
        self.meetings: Counter[str] = Counter()
        """By group of ranks, how often it has met."""
        self.left: set[str] = set()
        """Groups of ranks in which somebody did not come."""


_world: list[_World] = []


def all_ranks_are_audited(settings: str) -> bool:
    """Return whether all ranks are, with these settings; waits, the first time, for those that are late."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if not dist.is_initialized():
        return False
    default = distributed_c10d._get_default_group()  # private; torch 2.1 to 2.15
    if not _world or _world[0].default() is not default:
        _world[:] = [world := _World(default)]
        ranks = dist.get_rank(), dist.get_world_size()
        world.all_are_audited = _settle(_store(), world.prefix, settings, *ranks)
        if not world.all_are_audited:
            log.warning("audit: ranks are not compared, as not all of them are audited (%s)", settings)
    return _world[0].all_are_audited


def _store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()  # private; torch 2.1 to 2.15


def _settle(store: Any, prefix: str, settings: str, rank: int, world_size: int) -> bool:
    store.set(f"{prefix}/{rank}", settings)
    others = [f"{prefix}/{number}" for number in range(world_size)]
    try:
        store.wait(others, _PATIENCE)
        verdict = _YES if all(store.get(key) == settings.encode() for key in others) else _NO
    except Exception:  # torch has had several kinds for a store's timeout
        verdict = _NO
    # The first decision counts for all: a rank that was late may have seen what another had given up waiting for.
    return _decide(store, f"{prefix}/decision", verdict)


def all_have_come(group: Any) -> bool:
    """Return, alike on all ranks of a process group, whether all of them have come here as often as this one."""
    import torch.distributed as dist

    ranks, world = dist.get_process_group_ranks(group), _world[0]
    name = f"{world.prefix}/{hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()}"
    if name in world.left:
        return False
    world.meetings[name] += 1
    if not _meet(_store(), name, len(ranks), world.meetings[name]):
        world.left.add(name)
        log.warning(
            "audit: ranks %s are not compared any more: one of them has not come to this optimizer step within "
            "%d seconds. A rank that skips steps trains another model",
            ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else ""),
            _PATIENCE.total_seconds(),
        )
        return False
    return True


def _meet(store: Any, name: str, size: int, number: int) -> bool:
    meeting = f"{name}/{number}"
    if store.add(f"{name}/arrivals", 1) == size * number:
        have_come = _decide(store, meeting, _YES)
        store.delete_key(f"{name}/{number - 1}")  # everybody has left it: the store does not grow
        return have_come
    try:
        store.wait([meeting], _PATIENCE)
    except Exception:  # torch has had several kinds for a store's timeout
        return _decide(store, meeting, _NO)
    return bool(store.get(meeting) == _YES.encode())


def _decide(store: Any, key: str, verdict: str) -> bool:
    """Write a verdict unless there is one; return whether the one that counts is yes."""
    decision: bytes = store.compare_set(key, "", verdict)
    return decision == _YES.encode()
