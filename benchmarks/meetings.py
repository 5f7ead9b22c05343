"""The cost of the audit's meetings in torch.distributed's store, by the number of ranks.

    python benchmarks/meetings.py [--clients 32] [--meetings 200]

Two measurements. One rank of 8 to 131,072, under torch's fake process group, with a store in which all others have
always come: a rank's own time to settle who is audited, and to meet. And a real TCPStore in a process of its own,
with as many clients as --clients, each a connection: the processor time that the server takes for a rank, from
which follows that for all ranks. Everybody waits for the server, so that a meeting takes as long as its work for
all; its share is that of the 50 steps of 5 s between two comparisons, and that of one step with `raise`. Prints a
table, and exits with 1 if more is taken than is promised. Needs megapatch and torch.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megapatch.audit import _participants
from megapatch.audit._participants import Participants

RANKS = (8, 1_024, 16_384, 131_072)
MOST_TO_SETTLE, MOST_TO_MEET = 0.050, 0.005  # seconds of a rank's own time
MOST_OPERATIONS = 3  # of a rank in a meeting
MOST_OF_SERVER, AT = 0.01, 16_384  # of the time between two comparisons, at so many ranks
STEP, STEPS = 5.0, 50  # seconds, and steps between two comparisons
SETTINGS = "every 50, raises False"
SERVER = """
import sys, time
from torch.distributed import TCPStore
server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(server.port, flush=True)
for _ in sys.stdin:
    print(time.process_time(), flush=True)
"""


class Crowd:
    """A store in which all other ranks have come already, whichever number of them is looked for."""

    def __init__(self, size):
        self.size, self.operations, self.numbers = size, Counter(), Counter()

    def add(self, key, amount):
        self.operations["add"] += 1
        if "worlds/" in key:
            return 1
        self.numbers[key] += self.size * amount
        return self.numbers[key]

    def wait(self, keys, timeout):
        self.operations["wait"] += 1

    def set(self, key, value):
        self.operations["set"] += 1

    def delete_key(self, key):
        self.operations["delete_key"] += 1

    def compare_set(self, key, expected, desired):
        self.operations["compare_set"] += 1
        return desired.encode()


def of_one_rank(size, meetings):
    """Return the seconds that one of `size` ranks takes to settle and to meet, and its operations in a meeting."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        settling, meeting, operations = [], [], 0
        for _ in range(5):
            crowd = Crowd(size)
            _participants.default_store = lambda crowd=crowd: crowd
            participants = Participants()
            begin = time.perf_counter()
            assert participants.all_are_audited(SETTINGS)
            assert participants.all_have_come(dist.group.WORLD)  # the largest group that there can be
            settling.append(time.perf_counter() - begin)
            for _ in range(meetings):
                before = crowd.operations.total()
                begin = time.perf_counter()
                assert participants.all_have_come()
                meeting.append(time.perf_counter() - begin)
                operations = max(operations, crowd.operations.total() - before)
        return statistics.median(settling), statistics.median(meeting), operations
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------ a real server
@contextlib.contextmanager
def served(clients):
    """Yield the connections of some clients, and a function for the seconds that the server has worked."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        port = int(server.stdout.readline())

        def worked():
            server.stdin.write("\n")
            server.stdin.flush()
            return float(server.stdout.readline())

        yield [dist.TCPStore("127.0.0.1", port, is_master=False) for _ in range(clients)], worked
        server.kill()


def of_the_server(clients, meetings):
    """Return the seconds of the server's work, for a rank, to settle and to meet; and those of a whole meeting."""
    with served(clients) as (stores, worked), ThreadPoolExecutor(clients) as threads:

        def together(function):
            before, begin = worked(), time.perf_counter()
            assert all(threads.map(function, stores, range(clients)))
            return (worked() - before) / clients, time.perf_counter() - begin

        def settle(store, rank):
            return _participants._settle(store, SETTINGS, rank, clients)[1] == _participants._YES

        def meet(store, rank):
            return all(_participants._meet(store, "all", clients, number) for number in range(1, meetings + 1))

        settling = [together(settle)[0] for _ in range(20)]
        meeting, seconds = together(meet)
        return statistics.median(settling), meeting / meetings, seconds / meetings


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=32, help="of the real store")
    parser.add_argument("--meetings", type=int, default=200)
    options = parser.parse_args()
    settled_by_server, met_by_server, seconds = of_the_server(options.clients, options.meetings)
    print(
        f"{options.clients} clients of a TCPStore: a meeting {seconds * 1e3:.1f} ms, "
        f"the server's work {met_by_server * 1e6:.0f} us a rank, and {settled_by_server * 1e6:.0f} us to settle"
    )
    print(f"{'':8}  a rank's own time{'':16}the server's, for all ranks (extrapolated)")
    print("   ranks   settling   meeting operations   settling   meeting   share  with raise")
    too_much = False
    for size in RANKS:
        settling, meeting, operations = of_one_rank(size, options.meetings)
        share = met_by_server * size / (STEP * STEPS)
        print(
            f"{size:>8} {settling * 1e3:>7.2f} ms {meeting * 1e3:>6.2f} ms {operations:>10} "
            f"{settled_by_server * size:>8.3f} s {met_by_server * size:>7.3f} s "
            f"{share:>7.2%} {share * STEPS:>11.2%}"
        )
        too_much |= settling > MOST_TO_SETTLE or meeting > MOST_TO_MEET or operations > MOST_OPERATIONS
        too_much |= size <= AT and share > MOST_OF_SERVER
    print(
        f"at most: {MOST_TO_SETTLE * 1e3:.0f} ms, {MOST_TO_MEET * 1e3:.0f} ms, {MOST_OPERATIONS} operations, and "
        f"{MOST_OF_SERVER:.0%} of the server at {AT:,} ranks"
    )
    return int(too_much)


if __name__ == "__main__":
    sys.exit(main())
