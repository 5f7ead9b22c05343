"""Settle, before the audit's collectives in a step, that every rank makes them.

A rank may be without the audit, have other settings, or skip an optimizer step. It would leave the others waiting
for ever, or take the audit's collective for one of Megatron's. So ranks meet in the store that torch.distributed
was initialized with. Each adds to a counter there; the last one to come writes a key, and the others wait for it.
That is two or three operations a rank, whatever their number. A rank waits for at most `_PATIENCE`, for others or
for the store; after that nothing is compared again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

from .._ranks import default_store
from .._reporting.meetings import meet, name_of
from .._reporting.numbers import numbered
from .._version import see

log = logging.getLogger("megapatch")

_PATIENCE = timedelta(seconds=120)
_FOR_OTHERS = 0.9  # of the patience: the rest is for the store, to say afterwards who has come
_RANKS = 2**20  # more than a world has; its square leaves 23 bits of a store's numbers for a digest
_YES = "yes"
_T = TypeVar("_T")


class _World:
    """The state of an audit's meetings in one default process group of torch.distributed."""

    def __init__(self, default: Any) -> None:
        self.default = weakref.ref(default)
        self.prefix = ""
        self.is_compared = False
        self.names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        """By process group: a list of 131,072 ranks takes milliseconds to hash."""
        self.meetings: Counter[str] = Counter()
        """By name, how often these ranks have met."""
        self.left: set[str] = set()
        """Names of groups in which somebody did not come."""


class Participants:
    """The ranks that take part in an audit's collectives."""

    def __init__(self) -> None:
        self._world: _World | None = None

    @property
    def are_known(self) -> bool:
        """Whether they are known to be all audited, and all of them have always come so far."""
        return self._world is not None and self._world.is_compared

    def all_are_audited(self, settings: str) -> bool:
        """Return whether all ranks are, with these settings; waits, the first time, for those that are late."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        if not dist.is_initialized():
            return False
        default = distributed_c10d._get_default_group()  # private; torch 2.1 to 2.15
        if self._world is None or self._world.default() is not default:
            self._world = world = _World(default)
            store, rank, size = default_store(), dist.get_rank(), dist.get_world_size()
            try:
                world.prefix, verdict = _in_time(lambda: _settle(store, settings, rank, size))
            except Exception as error:
                verdict = _failure(error)
            world.is_compared = verdict == _YES
            if not world.is_compared:
                log.warning(
                    "audit: ranks are not compared, as %s (here: %s)" + see("audit-ranks"), verdict, settings
                )
        return self._world.is_compared

    def all_have_come(self, group: Any = None, for_names: bool = False) -> bool:
        """Return whether every rank has come here as often as this one; all get one answer.

        Args:
            group: the process group whose ranks meet; None for all ranks.
            for_names: whether a rank that does not come has not come to this step: it is waited for once only.
        """
        import torch.distributed as dist

        world = self._world
        if world is None or not world.is_compared:
            return False
        name = _name(world, group)
        if name in world.left:
            return False
        world.meetings[name] += 1
        store, size, number = default_store(), dist.get_world_size(group), world.meetings[name]
        have_come = _ask(world, lambda: _meet(store, name, size, number))
        if have_come is False:
            _leave(world, name, None if for_names else group)
        return bool(have_come)

    def number_who_say(self, what: str, group: Any) -> int:
        """Return how many ranks of a process group say this; 0 if not all have come here as often as this one."""
        world = self._world
        if world is None or not world.is_compared:
            return 0
        name, store = _name(world, group), default_store()
        key = f"{name}/{world.meetings[name] + 1}: {what}"
        if _ask(world, lambda: store.add(key, 1)) is None or not self.all_have_come(group):
            return 0
        return _ask(world, lambda: int(store.add(key, 0))) or 0


def _ask(world: _World, operate: Callable[[], _T]) -> _T | None:
    """Return the result of operations on the store; None, and compare no more, where it does not answer."""
    try:
        return _in_time(operate)
    except Exception as error:
        world.is_compared = False
        log.warning("audit: ranks are not compared any more: %s" + see("audit-late"), _failure(error))
        return None


def _leave(world: _World, name: str, group: Any) -> None:
    """Compare the ranks of a group no more: somebody did not come."""
    import torch.distributed as dist

    seconds = _PATIENCE.total_seconds()
    if group is None:
        world.is_compared = False
        log.warning(
            "audit: ranks are not compared any more: one of them has not come to this optimizer step within %g "
            "seconds. A rank that skips steps trains another model" + see("audit-late"),
            seconds,
        )
        return
    world.left.add(name)
    ranks = dist.get_process_group_ranks(group)
    log.warning(
        "audit: %s are not compared any more: one of them has not made this comparison within %g seconds"
        + see("audit-group"),
        numbered("rank", ranks),
        seconds,
    )


# ------------------------------------------------------------------------------------------ in the store
def _settle(store: Any, settings: str, rank: int, size: int) -> tuple[str, str]:
    """Return a prefix for the keys of this world, and `_YES` or why its ranks are not compared."""
    # A store may outlive the world that it was made for, with all its keys, and a world outlives an audit.
    prefix = f"megapatch.audit/{store.add(f'megapatch.audit/worlds/{rank}', 1)}"
    # The counter's low digits show who has come; above them the sum shows whether all settings are these.
    digest = hashlib.blake2b(settings.encode(), digest_size=3).digest()
    own = 1 + _RANKS * (int.from_bytes(digest, "big") >> 1)
    total = store.add(f"{prefix}/settings", own)
    verdict = "not all of them are audited"
    if total % _RANKS == size:
        verdict = _YES if total == size * own else "they are audited with different settings"
    else:
        with contextlib.suppress(Exception):  # torch has had several kinds for a store's timeout
            store.wait([f"{prefix}/decision"], _PATIENCE * _FOR_OTHERS)
    # The first decision counts for all: somebody may have given up waiting just before the last one came.
    decision: bytes = store.compare_set(f"{prefix}/decision", "", verdict)
    return prefix, decision.decode()


def _meet(store: Any, name: str, size: int, number: int) -> bool:
    return meet(store, name, size, number, _PATIENCE * _FOR_OTHERS)


def _in_time(operate: Callable[[], _T]) -> _T:
    """Return the result of operations on a store, or raise `_Silence` where they take longer than the patience.

    A store whose host is frozen does not answer, and only its `wait` has a time limit.
    """
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(operate())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="megapatch-audit", daemon=True)
    thread.start()
    thread.join(_PATIENCE.total_seconds())
    if not future.done():
        raise _Silence
    return future.result()


class _Silence(Exception):
    """A store has not answered."""


# ------------------------------------------------------------------------------------------ names and words
def _name(world: _World, group: Any) -> str:
    """Return the name of a group's meetings, the same on all of its ranks."""
    import torch.distributed as dist

    if group is None:
        return f"{world.prefix}/all"
    if group not in world.names:
        world.names[group] = f"{world.prefix}/{name_of(dist.get_process_group_ranks(group))}"
    return world.names[group]


def _failure(error: Exception) -> str:
    if isinstance(error, _Silence):
        return f"torch.distributed's store has not answered within {_PATIENCE.total_seconds():g} seconds"
    what = str(error).partition("\n")[0][:200]  # torch adds a stack trace
    return f"torch.distributed's store does not work: {type(error).__name__}: {what}"
