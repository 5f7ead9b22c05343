"""The cost of assert_consistent() on a rank, by the number of ranks, where all agree.

    python benchmarks/agreement.py

The table and the work on it are real; there is no network. Shown beside it are the bytes that a rank would receive
if all gathered a table of 4 KiB: they grow with the number of ranks.
"""

from __future__ import annotations

import sys
import time
import tracemalloc

from megapatch._reporting import agreement
from megapatch._reporting.facts import facts

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


def main() -> int:
    reduced()  # imports and caches
    bytes_reduced = 2 * 8 * agreement._SLOTS
    seconds, peak = cost(reduced)
    print(f"{'ranks':>8} {'bytes reduced':>14} {'bytes if gathered':>18} {'ratio':>8}")
    for ranks in RANKS:
        bytes_gathered = GATHERED * ranks
        print(f"{ranks:>8} {bytes_reduced:>14,} {bytes_gathered:>18,} {bytes_reduced / bytes_gathered:>8.4f}")
    print(f"a rank's own work, at any number of ranks: {seconds * 1000:.1f} ms, {peak:.2f} MiB at most")
    return 0 if peak < 1 else 1


if __name__ == "__main__":
    sys.exit(main())
