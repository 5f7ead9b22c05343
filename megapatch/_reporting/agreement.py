"""Check that all processes of a run are patched alike: one rank without a patch is worse than no rank with it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .. import _versions
from .._engine.engine import this_process
from .._version import __version__
from ..errors import InconsistentError, MisuseError

if TYPE_CHECKING:
    import torch

# Rows of two 8-byte numbers: 4 KiB a rank, room for several times the sites that exist. Two versions of megapatch
# with different values would wait for each other forever.
_ROWS = 256


Facts = dict[str, tuple[str, str]]
"""The findings in one process, by the name of a distribution or ``patch at module``: the value to compare, and the
reason to give where it differs. Plain types, because they travel between versions of megapatch."""


def assert_consistent(group: torch.distributed.ProcessGroup | None = None) -> None:
    """Raise InconsistentError on all ranks of a process group when one is patched unlike the others.

    Compares the versions of megapatch, torch, megatron-core and wrapt, and for every site its status and the
    targets that are really replaced. Modules that a rank has not loaded do not count there: trainer and rollout
    ranks load different ones. So call it just before training begins, when everything that matters is imported.

    Takes one collective of 4 KiB a rank when all agree, and two or three more to find out who differs.

    Args:
        group: a process group of torch.distributed, on any backend, including gloo and NCCL; None for all ranks.

    Raises:
        InconsistentError: when ranks differ; the message names the first difference and the ranks.
        MisuseError: without an initialized torch.distributed, or on a rank that is not in the group.
    """
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise MisuseError(
            "assert_consistent() compares ranks: call it after torch.distributed.init_process_group()"
        )
    if dist.get_rank(group) < 0:
        raise MisuseError("assert_consistent() was called with a group that this rank is not in")
    size = dist.get_world_size(group)
    here = facts()
    device = torch.device("cuda", torch.cuda.current_device()) if _wants_cuda(dist.get_backend(group)) else "cpu"
    table = torch.tensor(_table(here), dtype=torch.int64, device=device)
    tables = [torch.empty_like(table) for _ in range(size)]
    dist.all_gather(tables, table, group=group)
    if _agree(torch.stack(tables).tolist()):
        return
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, here, group=group)
    text = difference(
        everyone, lambda members: numbered("rank", [_in_world(dist, group, rank) for rank in members])
    )
    if text is not None:  # None: there was more to compare than has room in a table
        raise InconsistentError(f"megapatch is not the same on all ranks: {text}")


def facts() -> Facts:
    """Return what this process has to agree on with others: versions, then sites in the catalogue's order."""
    found = {"megapatch": (__version__, "")}
    for distribution, version in _versions.here().items():
        if _versions.PACKAGES[distribution] in sys.modules:
            found[distribution] = (version, "")
    for record in this_process().records:
        if record.site.module in sys.modules:
            record.refresh()
            targets = ", ".join(target.target for target in record.installed if target.is_in_effect)
            value = f"{record.status.value} ({targets})" if targets else record.status.value
            found[f"{record.patch.name} at {record.site.module}"] = (value, record.reason)
    return found


def difference(everyone: Sequence[Facts], who: Callable[[list[int]], str]) -> str | None:
    """Describe the first fact that processes disagree on, and count the others; None when they agree.

    Args:
        everyone: the facts of each process.
        who: words for the processes at these positions of `everyone`.
    """
    differing = {}
    for name in dict.fromkeys(name for found in everyone for name in found):
        holders: dict[str, list[int]] = {}
        for position, found in enumerate(everyone):
            if name in found:
                holders.setdefault(found[name][0], []).append(position)
        if len(holders) > 1:
            differing[name] = holders
    for name, holders in differing.items():
        clauses = [
            f"{value} on {who(members)}" + (f" ({why})" if (why := everyone[members[0]][name][1]) else "")
            for value, members in holders.items()
        ]
        more = f". And {len(differing) - 1} more" if len(differing) > 1 else ""
        return f"{name} is {'; '.join(clauses)}{more}. `megapatch doctor` shows more, in each environment"
    return None


def _table(found: Facts) -> list[list[int]]:
    """Return a first row with the number of facts, then the digests of each fact's name and value."""
    rows = [[len(found), 0]] + [[_digest(name), _digest(value)] for name, (value, _) in found.items()]
    return (rows + [[0, 0]] * _ROWS)[:_ROWS]


def _agree(tables: Sequence[Sequence[Sequence[int]]]) -> bool:
    values: dict[int, int] = {}
    for (count, _), *rows in tables:
        if count > len(rows) or any(values.setdefault(name, value) != value for name, value in rows[:count]):
            return False
    return True


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def _wants_cuda(backend: str) -> bool:
    """Return whether a collective of this backend takes only GPU tensors. (``cpu:gloo,cuda:nccl`` takes both.)"""
    return "nccl" in backend and "cpu:" not in backend


def _in_world(dist: Any, group: torch.distributed.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else int(dist.get_global_rank(group, rank))


def numbered(what: str, numbers: list[int]) -> str:
    """Return numbers in words: ``rank 3``, or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{what}{'s' if len(numbers) > 1 else ''} {words}"
