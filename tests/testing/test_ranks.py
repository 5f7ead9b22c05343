"""run_ranks: what it returns, what it says when ranks fail, and that nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed
from rigs.imported import run_with_megatron

from megapatch.testing import RanksFailed, RanksTimedOut, run_ranks


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be noticed does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def note_pids(folder: Path, *pids: int) -> None:
    for pid in pids:
        (folder / f"pid-{pid}").touch()


def noted_pids(folder: Path, count: int) -> list[int]:
    """The pids that `note_pids` left, when there are `count`."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if len(found := [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]) == count:
            return found
        time.sleep(0.02)
    raise AssertionError(f"no {count} processes started")


def assert_ended(folder: Path, count: int, patience: float = 0.0) -> None:
    pids = noted_pids(folder, count)
    deadline = time.monotonic() + patience
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if is_alive(pid)]


# ------------------------------------------------------------------------------------------ jobs


def describe(rank, world_size, *args):
    total = torch.ones(1) * rank
    torch.distributed.all_reduce(total)
    return {
        "args": (rank, world_size, *args),
        "sum": total,
        "device": torch.zeros(1, device="cuda").device.type,
        "threads": torch.get_num_threads(),
        "environment": {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "ADDED", "LATE", "UNSET")},
        "setup": getattr(sys, "setup_saw", None),
        "filters": [action for action, *_ in warnings.filters],
    }


def remember_the_moment():
    sys.setup_saw = {
        "stubs": torch.zeros(1, device="cuda").device.type,
        "megatron": [name for name in sys.modules if name.startswith("megatron")],
        "process group": torch.distributed.is_initialized(),
    }


def fail_on_rank_1(rank, world_size):
    if rank == 1:
        raise BaseException("on purpose")
    time.sleep(60)


def end_on_rank_1(rank, world_size, how):
    if rank == 1:
        how()
    time.sleep(60)


def leave_with_7():
    os._exit(7)


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def abort_natively():
    os.abort()


def hang_on_rank_1(rank, world_size, folder):
    note_pids(folder, os.getpid())
    if rank == 1:
        hang()
    return rank


def hang():
    time.sleep(60)


def start_processes(rank, world_size, folder):
    """A forked child, which has inherited the channel to the caller, and a program."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    other = subprocess.Popen(["sleep", "60"])
    note_pids(folder, os.getpid(), child, other.pid)
    return "done"


def end_with_a_child_left(rank, world_size, folder):
    start_processes(rank, world_size, folder)
    os._exit(3)


def return_a_function(rank, world_size):
    return lambda: None


# ----------------------------------------------------------------------------------------- tests


def test_results_come_by_rank_from_a_world_that_is_ready(monkeypatch):
    monkeypatch.setenv("UNSET", "x")
    run_ranks(describe, 1)  # the server runs from here on
    monkeypatch.delenv("UNSET")
    monkeypatch.setenv("LATE", "1")
    results = run_ranks(describe, 3, "a", setup=remember_the_moment, env={"ADDED": "2"})
    assert [result["args"] for result in results] == [(rank, 3, "a") for rank in range(3)]
    assert [result["sum"].item() for result in results] == [3.0] * 3
    for rank, result in enumerate(results):
        assert result["device"] == "cpu"
        assert result["threads"] == 1
        assert result["environment"] == {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "ADDED": "2",
            "LATE": "1",
            "UNSET": None,
        }
        assert result["setup"] == {"stubs": "cpu", "megatron": [], "process group": False}
        assert set(result["filters"]) == {"ignore", "error"}


def surroundings(rank, world_size):
    torch_of_it = torch.get_num_threads(), str(torch.cuda.current_device()), torch.distributed.is_initialized()
    return dict(os.environ), sys.path, [str(each[:3]) for each in warnings.filters], torch_of_it


def test_a_rank_from_a_server_that_has_imported_megatron_is_as_any():
    assert run_with_megatron(surroundings, 1) == run_ranks(surroundings, 1)


def test_a_traceback_comes_with_its_rank_and_who_waited():
    started = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail_on_rank_1, 2)
    assert time.monotonic() - started < 30
    assert list(caught.value.failures) == [1]
    assert list(caught.value.waiting) == [0]
    message = str(caught.value)
    assert message.index("rank 1 of 2 failed") < message.index("rank 0 of 2 was still waiting")
    assert "BaseException: on purpose" in message
    assert "in fail_on_rank_1" in caught.value.failures[1]
    assert "in fail_on_rank_1" in caught.value.waiting[0]


@pytest.mark.parametrize(("how", "said"), [(leave_with_7, "exit code 7"), (kill_itself, "signal SIGKILL")])
def test_a_rank_that_just_ends(how, said):
    with pytest.raises(RanksFailed, match=f"rank 1 of 2 failed:\n.*{said}") as caught:
        run_ranks(end_on_rank_1, 2, how)
    assert list(caught.value.waiting) == [0]


def test_a_rank_that_native_code_ends():
    with pytest.raises(RanksFailed, match="signal SIGABRT") as caught:
        run_ranks(end_on_rank_1, 2, abort_natively)
    assert "in abort_natively" in caught.value.failures[1]


def test_a_rank_that_hangs(tmp_path):
    started = time.monotonic()
    with pytest.raises(RanksTimedOut, match=r"rank 1 of 2 did not finish within 6 s") as caught:
        run_ranks(hang_on_rank_1, 2, tmp_path, timeout=6)  # rank 0 has to be done by then
    assert 6 <= time.monotonic() - started < 20
    assert "in hang" in str(caught.value)
    assert "rank 0" not in str(caught.value)
    assert_ended(tmp_path, 2)


def test_processes_that_ranks_started_end_too(tmp_path):
    assert run_ranks(start_processes, 2, tmp_path) == ["done", "done"]
    assert_ended(tmp_path, 6, patience=1)


def test_a_child_that_keeps_the_channel_open_delays_nothing(tmp_path):
    with pytest.raises(RanksFailed, match="exit code 3"):
        run_ranks(end_with_a_child_left, 1, tmp_path, timeout=30)
    assert_ended(tmp_path, 3, patience=1)


def test_a_result_that_cannot_be_sent():
    with pytest.raises(RanksFailed, match="rank 0 of 1 failed"):
        run_ranks(return_a_function, 1)


@pytest.fixture
def interruptible():
    """Python leaves SIGINT alone where it was started to ignore it, as in a shell's background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_call_leaves_nothing(tmp_path, interruptible):
    def interrupt():
        noted_pids(tmp_path, 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(hang_on_rank_1, 2, tmp_path)
    thread.join()
    assert_ended(tmp_path, 2)


SCRIPT = """
    import os, sys, time
    from pathlib import Path
    from megapatch.testing import run_ranks

    def job(rank, world_size, folder):
        Path(folder, f"pid-{os.getpid()}").touch()
        Path(folder, "environment").write_text(IMPORTED_WITH or "")
        time.sleep(60)

    IMPORTED_WITH = os.environ.get("ADDED")
    if __name__ == "__main__":
        run_ranks(job, 2, sys.argv[1], env={"ADDED": "early"})
"""


def test_a_killed_script_leaves_nothing(tmp_path):
    script = tmp_path / "script"  # as installed commands have no suffix
    script.write_text(textwrap.dedent(SCRIPT))
    with subprocess.Popen([sys.executable, str(script), str(tmp_path)]) as caller:
        noted_pids(tmp_path, 2)
        caller.kill()
    assert_ended(tmp_path, 2, patience=5)
    assert (tmp_path / "environment").read_text() == "early"


def test_ranks_on_gpus_are_new_processes_that_need_one_each(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RanksFailed, match="torch sees no GPU here"):
        run_ranks(describe, 1, device="cuda")
