"""The cost of assert_consistent() on a rank, by the number of ranks: where all agree, and where one does not come.

    python benchmarks/agreement.py

The table and the work on it are real; there is no network. Shown beside it are the bytes that a rank would receive
if all gathered a table of 4 KiB: they grow with the number of ranks. Where one rank does not come, one of the
others is real here, and waits 0.01 s.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from datetime import timedelta
from unittest import mock

from megapatch._reporting import agreement
from megapatch._reporting.facts import facts
from megapatch._reporting.meetings import name_of
from megapatch.errors import InconsistentError

GATHERED = 4096  # bytes of each rank
RANKS = (8, 1_024, 16_384, 131_072)


def reduced() -> None:
    """One rank's share: make the table, and read the one that comes back."""
    assert agreement._differing(agreement._table(facts())) == []


def cost(action) -> tuple[float, float]:
    """Seconds, and the peak of Python's memory in MiB; in runs of their own, as tracing is slow."""
    begin = time.perf_counter()
    action()
    seconds = time.perf_counter() - begin
    tracemalloc.start()
    action()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, peak / 2**20


def failing(ranks: int) -> float:
    """Return the seconds in which a rank finds out that another one has not come."""
    import torch.distributed as dist

    store, everyone = dist.HashStore(), list(range(ranks))
    name = f"megapatch.agreement/{name_of(everyone)}"
    store.add(f"{name}/come", ranks - 2)
    store.append(f"{name}/1/here", "".join(f"{rank}," for rank in everyone[1:-1]))
    begin = time.perf_counter()
    with (
        mock.patch.object(agreement, "default_store", return_value=store),
        mock.patch.object(agreement, "_PATIENCE", timedelta(seconds=0.01)),
    ):
        try:
            agreement._wait_for_all(everyone, 0)
        except InconsistentError:
            return time.perf_counter() - begin
    raise AssertionError("nobody was missing")


def main() -> int:
    reduced()  # imports and caches
    bytes_reduced = 2 * 8 * agreement._SLOTS
    seconds, peak = cost(reduced)
    print(f"{'ranks':>8} {'bytes reduced':>14} {'bytes if gathered':>18} {'ratio':>8} {'one missing, ms':>16}")
    for ranks in RANKS:
        gathered = GATHERED * ranks
        shown = f"{ranks:>8} {bytes_reduced:>14,} {gathered:>18,} {bytes_reduced / gathered:>8.4f}"
        print(f"{shown} {1000 * failing(ranks):>16.1f}")
    print(f"a rank's own work, at any number of ranks: {seconds * 1000:.1f} ms, {peak:.2f} MiB at most")
    return 0 if peak < 1 else 1


if __name__ == "__main__":
    sys.exit(main())
