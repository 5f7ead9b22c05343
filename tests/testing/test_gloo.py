"""Gloo groups with one worker thread: all that a rank makes, and why."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megapatch.testing import run_ranks, use_one_gloo_thread

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "docs" / "upstream" / "gloo-last-completed-work.md"
REPRODUCER = re.search(r"```python\n(.*?)```", REPORT.read_text(), re.DOTALL)[1]
ONE_THREAD = "from megapatch.testing import use_one_gloo_thread\nassert use_one_gloo_thread()\n"
DEADLY = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS}
ATTEMPTS, SECONDS = 12, 5  # one attempt in three survived, when two processors had twenty processes to run


def gloo_threads(expected):
    """Count the groups' worker threads, each of which gives itself its name; wait until there are as many."""
    deadline = time.monotonic() + 10
    while True:
        names = []
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                names.append((task / "comm").read_text().strip())
        if (found := names.count("pt_gloo_runloop")) == expected or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def groups(rank, world_size):
    """Make a group in each way that torch has, and return their threads, and what each group knows of itself."""
    made = [
        dist.group.WORLD,
        dist.new_group([0, 1]),
        dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=77)),
        dist.new_group([rank], use_local_synchronization=True),
    ]
    own = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=78))  # as torch.distributed._dist2 does
    total = torch.ones(3) * (rank + 1)
    dist.all_reduce(total, group=made[2])
    options = [group._get_backend(torch.device("cpu")).options for group in made] + [own.options]
    seconds = [option._timeout.total_seconds() for option in options]
    return gloo_threads(5), [option._threads for option in options], seconds, total.tolist()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads in /proc")
def test_each_group_of_a_rank_has_one_thread_and_keeps_its_timeout():
    for threads, asked, seconds, total in run_ranks(groups, 2):
        assert threads == 5, (
            f"5 groups have {threads} worker threads with torch {torch.__version__}: collectives of one group may "
            f"end in any order, and two threads of a group may crash the process; see {REPORT.name}"
        )
        assert asked == [1] * 5
        assert seconds == [1800, 1800, 77, 1800, 78]
        assert total == [3, 3, 3]


def world_made_twice(rank, world_size):
    """Take the world down and make it again, as a trainer does that starts over."""
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    left = gloo_threads(0)
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world_size)
    return left, gloo_threads(1), dist.group.WORLD._get_backend(torch.device("cpu")).options._threads


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads in /proc")
def test_a_world_that_is_made_again_has_one_thread_too():
    assert run_ranks(world_made_twice, 2) == [(0, 1, 1)] * 2


def test_worlds_that_are_made_by_hand_ask_for_one_thread():
    of_jobs = ("tests/jobs/", "tests/rigs/jobs/")  # on_cpu.py has asked for it
    in_ranks = {  # run_ranks has
        "tests/patches/megatron/test_groups_destroyed.py",
        "tests/patches/megatron/test_save_fails_everywhere.py",
    }
    without_collectives = {"tests/audit/test_ranks.py", "tests/audit/test_meetings.py", "benchmarks/meetings.py"}
    others = {*in_ranks, *without_collectives, "tests/rigs/areal/engine.py", "tests/testing/test_gloo.py"}
    files = [path for folder in ("benchmarks", "examples", "tests") for path in (ROOT / folder).rglob("*.py")]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    worlds = {name for name, text in texts.items() if re.search(r"dist(ributed)?\.init_process_group\(", text)}
    by_hand = {name for name in worlds if "use_one_gloo_thread()" not in texts[name]}
    assert {name for name in by_hand if not name.startswith(of_jobs)} <= others


def test_a_torch_with_other_private_names_is_left_as_it_is(monkeypatch):
    original = dist.ProcessGroupGloo.__init__
    options = type("_Options", (), {"_devices": None, "_timeout": None, "num_threads": 2})
    monkeypatch.setattr(dist.ProcessGroupGloo, "_Options", options)
    assert use_one_gloo_thread.__wrapped__() is False
    assert dist.ProcessGroupGloo.__init__ is original


def survives(source):
    """Run this source with the reproducer after it, and return whether it ended well."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "MEGAPATCH_DISABLE": "*"}
    command = [sys.executable, "-W", "ignore", "-c", source + REPRODUCER, str(SECONDS)]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return False  # it waits for a lock of the broken heap
    assert done.returncode in {0, *DEADLY}, done.stderr
    return done.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="another C library may store strings otherwise")
def test_torch_still_needs_it():
    assert not all(survives("") for _ in range(ATTEMPTS)), (
        f"torch {torch.__version__} survived the reproducer of {REPORT.name} {ATTEMPTS} times: two worker threads "
        "a group seem to be safe again. Read ProcessGroupGloo::runLoop; if it takes the lock first, "
        "use_one_gloo_thread() is needed for older torches only"
    )


def test_with_one_thread_it_survives():
    assert survives(ONE_THREAD)
