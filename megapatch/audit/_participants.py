"""Settle, before each of the audit's collectives, that every rank makes it.

A rank without the audit, with other settings, or that has skipped an optimizer step would leave the others
waiting for ever, or take the audit's collective for one of Megatron's. So ranks meet in the store that
torch.distributed was initialized with, and wait there for at most `_PATIENCE`; where somebody does not come, none
of them makes the collective, and that group of ranks is not compared again.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections import Counter
from datetime import timedelta
from typing import Any

log = logging.getLogger("megapatch")

_PATIENCE = timedelta(seconds=120)
_YES, _NO = "yes", "no"


class _World:
    """The state of an audit's meetings in one default process group of torch.distributed."""

    def __init__(self, default: Any) -> None:
        self.default = weakref.ref(default)
        self.prefix = ""
        self.all_are_audited = False
        self.meetings: Counter[str] = Counter()
        """By group of ranks, how often it has met."""
        self.left: set[str] = set()
        """Groups of ranks in which somebody did not come."""

    def name_of(self, group: Any) -> str:
        """Return the name in the store of the ranks of a process group."""
        import torch.distributed as dist

        ranks = dist.get_process_group_ranks(group)
        return f"{self.prefix}/{hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()}"


class Participants:
    """The ranks that take part in an audit's collectives."""

    def __init__(self) -> None:
        self._world: _World | None = None

    def all_are_audited(self, settings: str) -> bool:
        """Return whether all ranks are, with these settings; waits, the first time, for those that are late."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        if not dist.is_initialized():
            return False
        default = distributed_c10d._get_default_group()  # private; torch 2.1 to 2.15
        if self._world is None or self._world.default() is not default:
            self._world = world = _World(default)
            rank, store = dist.get_rank(), _store()
            # A store may outlive the world that it was made for, with all its keys, and a world outlives an audit.
            world.prefix = f"megapatch.audit/{store.add(f'megapatch.audit/worlds/{rank}', 1)}"
            world.all_are_audited = _settle(store, world.prefix, settings, rank, dist.get_world_size())
            if not world.all_are_audited:
                log.warning("audit: ranks are not compared, as not all of them are audited (%s)", settings)
        return self._world.all_are_audited

    def all_have_come(self, group: Any) -> bool:
        """Return whether every rank of a process group has come here as often as this one; all get one answer."""
        import torch.distributed as dist

        world = self._world
        if world is None:
            return False
        ranks, name = dist.get_process_group_ranks(group), world.name_of(group)
        if name in world.left:
            return False
        world.meetings[name] += 1
        if not _meet(_store(), name, len(ranks), world.meetings[name]):
            world.left.add(name)
            log.warning(
                "audit: ranks %s are not compared any more: one of them has not come to this optimizer step "
                "within %d seconds. A rank that skips steps trains another model",
                ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else ""),
                _PATIENCE.total_seconds(),
            )
            return False
        return True

    def number_who_say(self, what: str, group: Any) -> int:
        """Return how many ranks of a process group say this; 0 if not all have come here as often as this one."""
        if self._world is None:
            return 0
        name = self._world.name_of(group)
        key, store = f"{name}/{self._world.meetings[name] + 1}: {what}", _store()
        store.add(key, 1)
        return int(store.add(key, 0)) if self.all_have_come(group) else 0


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
    # The first decision counts for all: a late rank may have seen a key that another had given up waiting for.
    return _decide(store, f"{prefix}/decision", verdict)


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
