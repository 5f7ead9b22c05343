"""How ranks meet in the store: in few operations, with one answer for all, and for no longer than the patience."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from rigs.audit import running_audit
from rigs.cells import AUDITED
from rigs.imported import after_megatron, run_with_megatron
from rigs.log import Log
from rigs.megatron.options import UNPATCHED

from megapatch.audit import _participants
from megapatch.audit._participants import Participants, _meet, _settle
from megapatch.testing import init_parallel, tiny_gpt

dist = torch.distributed
YES = "yes"
PATIENCE = 0.5
SERVER = """
import time
from torch.distributed import TCPStore
server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(server.port, flush=True)
time.sleep(600)
"""


class Counting:
    """A store of which one rank's operations are counted, and may raise."""

    def __init__(self, store, broken=()):
        self.store, self.broken, self.calls = store, broken, Counter()

    def __getattr__(self, name):
        def operate(*args):
            self.calls[name] += 1
            if name in self.broken:
                raise RuntimeError(f"{name} is broken")
            return getattr(self.store, name)(*args)

        return operate

    def taken(self):
        """Return the number of operations since the last time."""
        count, self.calls = self.calls.total(), Counter()
        return count


def hash_clients(size):
    return [dist.HashStore()] * size


def tcp_clients(size):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [server, *(dist.TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(size - 1))]


def together(stores, function):
    """Call a function of a store and a rank by all ranks at once, each a thread; return the results."""
    with ThreadPoolExecutor(len(stores)) as threads:
        return list(threads.map(function, stores, range(len(stores))))


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(_participants, "_PATIENCE", timedelta(seconds=PATIENCE))


# ------------------------------------------------------------------------ operations
@pytest.mark.parametrize("clients", [hash_clients, tcp_clients])
@pytest.mark.parametrize("size", [1, 2, 16])
def test_a_rank_makes_as_many_operations_at_any_size(clients, size):
    stores = [Counting(client) for client in clients(size)]
    verdicts = together(stores, lambda store, rank: _settle(store, "alike", rank, size))
    assert set(verdicts) == {("megapatch.audit/1", YES)}
    assert max(store.taken() for store in stores) <= 4
    keys = []
    for number in range(1, 5):
        assert all(together(stores, lambda store, rank, number=number: _meet(store, "all", size, number)))
        taken = [store.taken() for store in stores]
        assert max(taken) <= 3 and sum(taken) == 2 * size + 1
        keys.append(stores[0].store.num_keys())
    assert len(set(keys)) == 1  # the store does not grow


def steps(rank, world_size):
    """Train with `raise` and a comparison in every step, and count the operations of each."""
    store = Counting(_participants.default_store())
    _participants.default_store = lambda: store
    init_parallel()
    model, log = tiny_gpt(), Log()
    taken = [(model.train_step(step), store.taken())[1] for step in range(4)]
    return taken, [text for text in log.texts if "compared" in text]


def test_a_step_takes_one_meeting_for_all_kinds_of_groups():
    for taken, said in run_with_megatron(
        steps, 2, setup=waiting_briefly, env={**UNPATCHED, **AUDITED, "MEGAPATCH_AUDIT": "raise"}
    ):
        assert not said
        assert taken[0] > max(taken[1:])  # settings, seeds, and whether all compare the same
        assert min(taken[1:]) >= 2 and max(taken[1:]) <= 3


@after_megatron
def waiting_briefly():
    _participants._PATIENCE = timedelta(seconds=3)


def untrained_stage(rank, world_size):
    """Train the second stage only: the optimizer of the first has no parameters."""
    init_parallel(pp=2)
    model, log = tiny_gpt(frozen=["*"] if rank == 0 else ()), Log()
    for step in range(3):
        model.train_step(step)
    return len(running_audit().models.stepped_by(model.optimizer)), log.texts


@pytest.mark.thorough
@pytest.mark.parametrize("audit", ["1", "raise"])
def test_a_rank_that_has_nothing_to_compare_comes_all_the_same(audit):
    env = {**UNPATCHED, **AUDITED, "MEGAPATCH_AUDIT": audit}
    assert run_with_megatron(untrained_stage, 2, setup=waiting_briefly, env=env) == [(0, []), (1, [])]


# ------------------------------------------------------------------------ one answer for all
def test_other_settings_are_known_at_once():
    shared = dist.HashStore()
    settings = ["every 50", "every 50", "every 7", "every 50"]
    verdicts = together([shared] * 4, lambda store, rank: _settle(store, settings[rank], rank, 4)[1])
    assert verdicts == ["they are audited with different settings"] * 4


def test_a_rank_that_is_not_audited_is_waited_for_once(impatient):
    shared = dist.HashStore()
    verdicts = together([shared] * 3, lambda store, rank: _settle(store, "alike", rank, 4)[1])
    late = _settle(shared, "alike", 3, 4)[1]
    assert [*verdicts, late] == ["not all of them are audited"] * 4


def test_somebody_who_comes_too_late_gets_the_answer_that_the_others_got(impatient):
    shared = dist.HashStore()
    assert together([shared] * 3, lambda store, rank: _meet(store, "all", 4, 1)) == [False] * 3
    late = Counting(shared)
    assert not _meet(late, "all", 4, 1)
    assert late.taken() == 1, "waits for ranks that have left"


@pytest.mark.parametrize("broken", [("set",), ("delete_key",), ("wait",)], ids=["writing", "deleting", "waiting"])
def test_a_yes_is_one_for_all_whatever_raises(impatient, broken):
    shared = dist.HashStore()
    stores = [Counting(shared, broken) for _ in range(3)]
    arrivals = threading.Barrier(3)

    def meet(store, rank):
        arrivals.wait()
        return _meet(store, "all", 3, 1)

    answers = together(stores, meet)
    assert len(set(answers)) == 1
    assert answers[0] or broken == ("wait",)  # who does not wait may look before the last one has come


def test_somebody_who_gives_up_just_as_the_last_one_comes_gets_the_same_answer():
    class Overtaken(Counting):
        """The last one comes after the one that gives up has looked."""

        def compare_set(self, *args):
            answers.append(_meet(self.store, "all", 2, 1))
            return self.store.compare_set(*args)

    answers = []
    answers.append(_meet(Overtaken(dist.HashStore(), ["wait"]), "all", 2, 1))
    assert answers == [True, True]


# ------------------------------------------------------------------------ a store that fails
@pytest.fixture(scope="module")
def server():
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        yield process, int(process.stdout.readline())
        process.kill()


@pytest.fixture
def participants(tmp_path, monkeypatch, server):
    store = dist.TCPStore("127.0.0.1", server[1], is_master=False)
    monkeypatch.setattr(_participants, "default_store", lambda: store)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/world", rank=0, world_size=1)
    yield Participants()
    server[0].send_signal(signal.SIGCONT)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (signal.SIGSTOP, "torch.distributed's store has not answered within 0.5 seconds"),
        (signal.SIGKILL, "torch.distributed's store does not work: Dist"),
    ],
    ids=["frozen", "dead"],
)
def test_a_store_that_fails_costs_the_patience_at_most_and_is_a_warning(
    participants, server, monkeypatch, caplog, sent, said
):
    assert participants.all_are_audited("settings") and participants.all_have_come()
    server[0].send_signal(sent)
    os.waitid(os.P_PID, server[0].pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # until it is
    monkeypatch.setattr(_participants, "_PATIENCE", timedelta(seconds=PATIENCE))
    begin = time.monotonic()
    assert not participants.all_have_come()
    assert not Participants().all_are_audited("settings")  # another audit, which settles
    assert time.monotonic() - begin < 20 * PATIENCE  # without a limit it would be for ever
    assert not participants.all_are_audited("settings") and not participants.all_have_come()
    of_meeting, of_settling = caplog.messages
    assert of_meeting.startswith(f"audit: ranks are not compared any more: {said}")
    assert of_settling.startswith(f"audit: ranks are not compared, as {said}")
