"""Check that all ranks are patched alike: one rank without a patch is worse than no rank with it.

Ranks compare a table of digests by one all-reduce, whose size does not depend on their number. The sites and
versions that this megapatch knows have a slot each. Facts of other distributions' patches share the rest by a
hash, and may look different where two meet in a slot, so ranks ask for the words before they report a difference.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .. import _versions
from .._mcore.devices import device_of
from .._ranks import default_store
from .._version import see
from ..errors import InconsistentError, MisuseError
from ..patches import PATCHES
from .facts import LOOK, Facts, difference, look
from .meetings import LATE, meet, name_of
from .numbers import numbered

if TYPE_CHECKING:
    import torch

log = logging.getLogger("megapatch")

# A table is 16 KiB. Two versions of megapatch with different numbers here could not compare.
_SLOTS = 1024
_NOTHING = 2**63 - 1
_PATIENCE = timedelta(minutes=10)


def assert_consistent(group: torch.distributed.ProcessGroup | None = None) -> None:
    """Raise InconsistentError on all ranks of a process group when one is patched unlike the others.

    Compares the versions of megapatch, torch, megatron-core and wrapt, and for every site its status and the
    targets that are really replaced. Modules that a rank has not loaded do not count there: trainer and rollout
    ranks load different ones. So call it just before training begins, when everything that matters is imported.

    Takes four operations of torch.distributed's store on each rank, and one all-reduce of 16 KiB when all agree,
    whatever the number of ranks. When they differ, the ranks gather the differing facts. No collective is made
    before all ranks have come.

    Args:
        group: a process group of torch.distributed, on any backend, including gloo and NCCL; None for all ranks.

    Raises:
        InconsistentError: when ranks differ, or one cannot tell; the message names the first difference and the
            ranks. Also where a rank does not come within ten minutes, or within four fifths of the group's
            timeout, as it has died, lacks megapatch or does not call this; the message names it. A WARNING on the
            lowest rank that has come does so after 30 seconds.
        MisuseError: without an initialized torch.distributed, or on a rank that is not in the group.
        Exception: torch's own, where a rank dies while differences are put into words.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise MisuseError(
            "assert_consistent() compares ranks: call it after torch.distributed.init_process_group()"
        )
    if dist.get_rank(group) < 0:
        raise MisuseError("assert_consistent() was called with a group that this rank is not in")
    if text := differing(group):
        raise InconsistentError(f"megapatch is not the same on all ranks: {text}")


def differing(group: torch.distributed.ProcessGroup | None = None) -> str | None:
    """Return the first difference between the ranks of a group, in words, or None. A collective."""
    import torch
    import torch.distributed as dist

    here = look()
    device = device_of(group)
    lowest_and_highest = torch.tensor(_table(here), dtype=torch.int64, device=device)
    group = group or dist.group.WORLD
    # Private: gloo's and NCCL's have it in torch 2.3 to 2.13.
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None) or _PATIENCE
    # A rank that has gone on ends the job when its collective's time is over, and nothing would name megapatch.
    _wait_for_all(dist.get_process_group_ranks(group), dist.get_rank(), min(_PATIENCE, timeout * 0.8))
    try:
        dist.all_reduce(lowest_and_highest, op=dist.ReduceOp.MIN, group=group)
    except RuntimeError as error:  # torch.distributed's are
        raise InconsistentError(
            "ranks could not be compared: all had come, and one has died since, or cannot be reached"
        ) from error
    slots = _differing(lowest_and_highest.tolist())
    for position, slot in enumerate(slots, 1):
        if text := _in_words(_of_slot(here, slot), len(slots) - position, group):
            return text
    return None


def _wait_for_all(ranks: list[int], rank: int, patience: timedelta) -> None:
    """Return when all ranks have come, by torch.distributed's store.

    A rank that does not come would take the all-reduce for its own next collective, and get garbage by it.

    Raises:
        InconsistentError: some have not come in time, which the message names.
    """
    store, size = default_store(), len(ranks)
    name = f"megapatch.agreement/{name_of(ranks)}"
    try:
        # Counted in the store, which may outlive a process and a process group.
        number = store.add(f"{name}/calls of {rank}", 1)
        here = f"{name}/{number}/here"
        if has_names := store.has_extended_api():  # all of torch's but FileStore
            store.append(here, f"{rank},")

        def have_come() -> list[int]:
            return [int(other) for other in store.get(here).decode().split(",") if other] if has_names else []

        def warn(rest: timedelta) -> None:
            if rank == min(come := have_come() or ranks):
                log.warning(
                    "ranks are not compared yet: %s did not come within %d seconds; waiting for %.0f more"
                    + see("not-come"),
                    _absent(ranks, come),
                    LATE.seconds,
                    rest.total_seconds(),
                )

        if meet(store, name, size, number, patience, warn):
            return
        come = have_come()
    except Exception as error:
        raise InconsistentError(
            f"ranks could not be compared: torch.distributed's store does not answer ({type(error).__name__}); "
            "the rank that holds it (usually rank 0) may have died"
        ) from error
    raise InconsistentError(
        f"ranks could not be compared: {_absent(ranks, come or ranks)} did not come within "
        f"{patience.total_seconds():g} seconds, so no collective was made. It has not imported megapatch, does "
        "not call this, has died, or waits elsewhere"
    )


def _absent(ranks: list[int], come: list[int]) -> str:
    missing = sorted({*ranks} - {*come})
    return numbered("rank", missing) if missing else "a rank"


def _in_words(here: Facts, others: int, group: Any) -> str | None:
    """Describe the ranks' values of one slot. Return None if they are the same. A collective.

    Args:
        here: this rank's facts in the slot.
        others: how many more slots differ.
    """
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    everyone: list[Any] = [None] * len(ranks)
    dist.all_gather_object(everyone, here, group=group)
    return difference(everyone, lambda members: numbered("rank", [ranks[member] for member in members]), others)


# ------------------------------------------------------------------------------------------ the table
def _table(found: Facts) -> list[int]:
    """Return a digest for each slot, then its negative.

    So the lowest of these numbers over all ranks show the lowest and the highest digest. A slot without a fact
    counts for neither.
    """
    slots: dict[int, Facts] = {}
    for name, fact in found.items():
        slots.setdefault(_slot(name), {})[name] = fact
    digests = {slot: _digest(repr(_compared(facts))) for slot, facts in slots.items()}
    lowest = [digests.get(slot, _NOTHING) for slot in range(_SLOTS)]
    return lowest + [-digests[slot] if slot in digests else _NOTHING for slot in range(_SLOTS)]


def _differing(lowest_and_highest: list[int]) -> list[int]:
    lowest, highest = lowest_and_highest[:_SLOTS], lowest_and_highest[_SLOTS:]
    return [slot for slot in range(_SLOTS) if lowest[slot] != _NOTHING and lowest[slot] != -highest[slot]]


def _of_slot(found: Facts, slot: int) -> Facts:
    return {name: fact for name, fact in found.items() if _slot(name) == slot}


def _compared(found: Facts) -> list[tuple[str, str]]:
    """Return names and values: reasons may differ."""
    return sorted((name, value) for name, (value, _) in found.items())


def _slot(name: str) -> int:
    own = _own_slots()
    return own[name] if name in own else len(own) + _digest(name) % (_SLOTS - len(own))


@functools.cache
def _own_slots() -> dict[str, int]:
    """Return the slots of the facts that every process with this version of megapatch may have."""
    names = [LOOK, "megapatch", *_versions.PACKAGES]
    names += [f"{patch.name} at {site.module}" for patch in PATCHES for site in patch.sites]
    return {name: slot for slot, name in enumerate(dict.fromkeys(names))}


def _digest(text: str) -> int:
    return (
        int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2
    )  # so that negatives have room, too
