"""Settle, before the audit's first collective, that every rank makes it.

A rank without the audit, or with other settings, would leave the others waiting for ever. So each rank leaves a
word in the store that torch.distributed was initialized with, and the first to know writes the decision for all.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

log = logging.getLogger("megapatch")

_PATIENCE = timedelta(seconds=120)
_DECISION = "megapatch.audit/decision"
_settled: list[tuple[Any, bool]] = []
"""The default process group, and whether all its ranks are audited."""


def all_ranks_are_audited(settings: str) -> bool:
    """Return whether all ranks are, with these settings; waits, the first time, for those that are late."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if not dist.is_initialized():
        return False
    default = distributed_c10d._get_default_group()  # private; torch 2.1 to 2.15
    if not _settled or _settled[0][0] is not default:
        decision = _settle(distributed_c10d._get_default_store(), settings, dist.get_rank(), dist.get_world_size())
        _settled[:] = [(default, decision)]
        if not decision:
            log.warning("audit: ranks are not compared, as not all of them are audited (%s)", settings)
    return _settled[0][1]


def _settle(store: Any, settings: str, rank: int, world_size: int) -> bool:
    store.set(f"megapatch.audit/{rank}", settings)
    others = [f"megapatch.audit/{number}" for number in range(world_size)]
    try:
        store.wait(others, _PATIENCE)
        verdict = "yes" if all(store.get(key) == settings.encode() for key in others) else "no"
    except Exception:  # torch has had several kinds for a store's timeout
        verdict = "no"
    # The first decision counts for all: a rank that was late may have seen what another had given up waiting for.
    decision: bytes = store.compare_set(_DECISION, "", verdict)
    return decision == b"yes"
