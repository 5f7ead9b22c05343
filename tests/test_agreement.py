"""assert_consistent(): the ranks agree on what is patched, or say which of them differ in what."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from datetime import timedelta

import pytest
from rigs.where import needs_megatron, needs_torch

import megapatch
from megapatch._mcore import devices
from megapatch._reporting import agreement, facts, meetings
from megapatch._reporting.facts import difference
from megapatch._reporting.numbers import numbered
from megapatch._versions import exact_version

DDP = "megatron.core.distributed.distributed_data_parallel"
RERUN = "megatron.core.rerun_state_machine"


def ranks(members):
    return numbered("rank", members)


@pytest.mark.parametrize(
    "everyone",
    [
        [{"torch": ("2.13.0", ""), "a at m": ("applied (m:f)", "it asserts")}] * 2,
        [{"a at m": ("applied", "")}, {"b at n": ("applied", "")}, {}],  # what a process has not loaded
        [{"a at m": ("disabled", "so")}, {"a at m": ("disabled", "thus")}],  # reasons
    ],
)
def test_what_is_no_difference(everyone):
    assert difference(everyone, ranks) is None


def test_reasons_are_not_compared():
    said, otherwise = ({"a at m": ("disabled", reason)} for reason in ("so", "thus"))
    assert agreement._table(said) == agreement._table(otherwise) != agreement._table({"a at m": ("applied", "so")})


def test_the_first_difference_is_told_with_ranks_and_reasons_and_the_others_are_counted():
    good = {"torch": ("2.13.0", ""), "a at m": ("applied (m:f)", "it asserts"), "b at n": ("applied", "")}
    bad = {"torch": ("2.13.0", ""), "a at m": ("disabled", "restored"), "b at n": ("failed", "KeyError")}
    assert difference([good, good, bad, good, good, bad], ranks) == (
        "a at m is applied (m:f) on ranks 0-1, 3-4 (it asserts); disabled on ranks 2, 5 (restored). And 1 more. "
        "`megapatch doctor` shows more, in each environment"
    )


def test_many_ranks_are_few_words():
    assert ranks(range(65_536)) == "ranks 0-65535" and ranks([2, 0, 1]) == "ranks 0-2"
    assert ranks(range(0, 32, 2)) == f"ranks {', '.join(map(str, range(0, 32, 2)))}"
    assert ranks([*range(0, 131_072, 2)]) == f"ranks {', '.join(map(str, range(0, 32, 2)))} and 65520 more"
    assert ranks([rank for rank in range(120) if rank % 3]).endswith(", 46-47 and 48 more")


def test_versions_come_first():
    (old, new) = ({"torch": (version, ""), "a at m": (version, "")} for version in ("2.6.0", "2.13.0"))
    assert difference([old, new], ranks).startswith("torch is 2.6.0 on rank 0; 2.13.0 on rank 1. And 1 more")


def named(count, value="applied"):
    return {f"patch {number} at m": (value, "") for number in range(count)}


def merged(*everyone):
    """As the all-reduce makes it of the tables of these processes."""
    return [min(column) for column in zip(*map(agreement._table, everyone), strict=True)]


def test_a_table_has_one_size_and_shows_each_difference():
    own = {name: ("applied", "") for name in agreement._own_slots()}
    assert {len(agreement._table(found)) for found in ({}, own, named(10_000))} == {2 * agreement._SLOTS}
    assert agreement._differing(merged(own, own, {}, {"torch": own["torch"]})) == []
    for name, slot in agreement._own_slots().items():
        assert agreement._differing(merged(own, own, {**own, name: ("failed", "")}, own)) == [slot]
    assert agreement._differing(merged(named(100), named(100))) == []
    assert agreement._differing(merged(named(100), named(100, "failed")))


def test_own_facts_do_not_share_a_slot():
    slots = agreement._own_slots()
    assert len(set(slots.values())) == len(slots) < agreement._SLOTS / 2
    assert min(agreement._slot(name) for name in named(1000)) >= len(slots)


def test_looking_that_raises_is_a_fact(monkeypatch):
    def stale():
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(facts._versions, "here", stale)
    found = facts.look()
    monkeypatch.undo()
    assert difference([facts.look(), found], ranks) == (
        "finding this out is possible on rank 0; impossible, OSError: [Errno 116] Stale file handle on rank 1. "
        "`megapatch doctor` shows more, in each environment"
    )


@needs_torch
def test_devices():
    backends = ("nccl", "gloo", "cpu:gloo,cuda:nccl", "cuda:nccl", "xccl", "npu:hccl", "unheard-of")
    kinds = [devices.kinds_of_devices(backend) for backend in backends]
    assert kinds[0] == kinds[3] == ["cuda"] and "cpu" in kinds[1] and "cpu" in kinds[2]
    assert kinds[4:] == [["xpu"], ["npu"], ["cpu"]]


@needs_torch
def test_a_backend_that_others_have_registered(monkeypatch):
    """As Ascend's hccl, which knows no CPU tensors."""
    import torch
    from torch.distributed import Backend

    monkeypatch.setattr(Backend, "backend_capability", {**Backend.backend_capability, "hccl": ["npu"]})
    npu = types.SimpleNamespace(current_device=lambda: 3)
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setattr(torch, "device", lambda *kind: kind)
    assert devices.device_for("hccl") == ("npu", 3)
    assert devices.device_for("gloo") == ("cpu",)


def test_what_this_process_has_loaded(modules):
    found = facts.facts()
    assert found["megapatch"][0] and found["wrapt"][0]
    assert not any(" at " in name and name.partition(" at ")[2] not in sys.modules for name in found)


def agreeing(rank, world_size):
    """Collectives that a call took, as torch counts them, and what it raised: one step after the other."""
    import torch.distributed as dist

    import megapatch

    def told(group=None):
        default = group or dist.distributed_c10d._get_default_group()
        before = default._get_sequence_number_for_group()
        try:
            megapatch.assert_consistent(group)
            error = None
        except megapatch.InconsistentError as one:
            error = str(one)
        return default._get_sequence_number_for_group() - before, error

    pair = dist.new_group([1, 2])
    found = {"nothing loaded": told()}
    importlib.import_module(DDP)
    if rank == 0:
        importlib.import_module(RERUN)
    found["different modules"] = told()
    if rank == 2:
        megapatch.restore("megatron.nested-no-sync")
    found["restored on one"] = told()
    if rank:
        found["in a group"] = told(pair)
    else:
        with pytest.raises(megapatch.patch.MisuseError, match="not in"):
            megapatch.assert_consistent(pair)
    if rank == 1:
        megapatch.restore("megatron.nested-no-sync")
    found["the others of a group"] = told(pair) if rank else None
    megapatch.apply()
    found["applied again"] = told()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_SLOTS", 1)
        patch.setattr(agreement, "_own_slots", dict)  # so that all facts share one slot
        plain = facts.facts
        patch.setattr(facts, "facts", lambda: {**plain(), **({"a at m": ("applied", "")} if rank == 0 else {})})
        found["one slot"] = told()
        if rank == 2:
            megapatch.restore("megatron.nested-no-sync")
        found["one slot, restored"] = told()
        megapatch.apply()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(facts._versions, "here", dict().popitem)
        found["a rank cannot look"] = told()
    if rank == 1:
        facts.exact_version = lambda: "0.0.1"
    found["another version"] = told()
    if rank:
        facts.exact_version = lambda: f"0.0.{rank}"
    found["three versions"] = told()
    return found


@needs_megatron
def test_ranks_agree_in_one_collective_or_say_who_differs():
    from megapatch.testing import run_ranks

    zero, one, two = run_ranks(agreeing, 3)
    restored = "disabled on rank 2 (restored in this process; megapatch.apply() installs it again)"
    for rank in (zero, one, two):
        for step in ("nothing loaded", "different modules", "applied again"):
            assert rank[step] == (1, None), step
        calls, error = rank["restored on one"]
        assert calls > 1
        assert error.startswith("megapatch is not the same on all ranks: megatron.nested-no-sync at ")
        assert f"{DDP} is applied ({DDP}:" in error and " on ranks 0-1 (" in error and restored in error
        assert rank["one slot"][0] > 1 and rank["one slot"][1] is None
        assert "on ranks 0-1 (" in rank["one slot, restored"][1] and restored in rank["one slot, restored"][1]
        assert "finding this out is possible on ranks 0, 2; impossible" in rank["a rank cannot look"][1]
        assert "KeyError" in rank["a rank cannot look"][1] and "on rank 1. `meg" in rank["a rank cannot look"][1]
        here = exact_version()
        assert f"megapatch is {here} on ranks 0, 2; 0.0.1 on rank 1. `meg" in rank["another version"][1]
        assert f"megapatch is {here} on rank 0; 0.0.1 on rank 1; 0.0.2 on rank 2. `m" in rank["three versions"][1]
    assert zero["restored on one"] == one["restored on one"] == two["restored on one"]
    for rank in (one, two):
        assert "applied" in rank["in a group"][1] and "on rank 1 (" in rank["in a group"][1]
        assert restored in rank["in a group"][1]
        assert rank["the others of a group"] == (1, None)


def missing(rank, world_size, how):
    """One rank dies, or goes on to its own next collective."""
    import os
    import signal
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    import megapatch

    agreement._PATIENCE = timedelta(seconds=30)
    megapatch.assert_consistent()
    agreement._PATIENCE = timedelta(seconds=1)
    if rank == 1 and how == "dies before":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how == "dies in the all-reduce":
        dist.all_reduce = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
    error = ""
    if rank != 1 or how != "does not call it":
        try:
            megapatch.assert_consistent()
        except megapatch.InconsistentError as found:
            error = str(found)
            if how != "does not call it":
                raise
    numbers = torch.full((4096,), float(rank + 1))
    dist.all_reduce(numbers)
    return error, numbers.unique().tolist()


@needs_torch
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("dies before", "rank 1 did not come within 1 seconds, so no collective was made. It has not imported"),
        ("dies in the all-reduce", "all had come, and one has died since, or cannot be reached"),
    ],
)
def test_where_a_rank_dies_the_others_raise_and_say_who(how, expected):
    from megapatch.testing import RanksFailed, run_ranks

    with pytest.raises(RanksFailed) as failed:
        run_ranks(missing, 3, how)
    assert sorted(failed.value.failures) == [0, 1, 2]
    for rank in (0, 2):
        assert f"InconsistentError: ranks could not be compared: {expected}" in failed.value.failures[rank]
    assert "SIGKILL" in failed.value.failures[1]


@needs_torch
def test_a_rank_that_does_not_come_meets_no_collective_of_ours():
    from megapatch.testing import run_ranks

    errors, numbers = zip(*run_ranks(missing, 3, "does not call it"), strict=True)
    assert all("rank 1 did not come within 1 seconds" in errors[rank] for rank in (0, 2)) and not errors[1]
    assert numbers == ([6.0],) * 3


@needs_torch
def test_one_key_says_who_has_come():
    """Of 1,000 ranks one is missing: no rank asks for each of the others."""
    import collections

    import torch.distributed as dist

    store, asked = dist.HashStore(), collections.Counter()

    class Counted:
        def __getattr__(self, name):
            asked[name] += 1
            return getattr(store, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "default_store", Counted)
        for rank in range(999):
            with pytest.raises(megapatch.InconsistentError) as found:
                agreement._wait_for_all([*range(1000)], rank, agreement.timedelta(seconds=0.01))
            assert rank or asked.total() <= 10
    assert "could not be compared: rank 999 did not come within 0.01 seconds" in str(found.value)


def waiting(rank, world_size):
    """Of three ranks the last does not come, then of the other two the first; collectives have little time."""
    import logging
    from datetime import timedelta

    import torch.distributed as dist

    import megapatch
    from megapatch._reporting import meetings

    said = []
    logging.getLogger("megapatch").addFilter(lambda record: said.append(record.getMessage()))
    meetings.LATE = agreement.LATE = timedelta(seconds=1)
    for ranks, absent in (([0, 1, 2], 2), ([1, 2], 1)):
        group = dist.new_group(ranks, timeout=timedelta(seconds=2))
        if rank in ranks and rank != absent:
            with pytest.raises(megapatch.InconsistentError, match=rf"rank {absent} did not come within 1\.6 sec"):
                megapatch.assert_consistent(group)
        dist.barrier()
    return said


@needs_torch
def test_the_lowest_rank_names_those_that_it_waits_for_before_their_collectives_time_out():
    from megapatch.testing import run_ranks

    first, second, third = run_ranks(waiting, 3)
    beginnings = [said.partition("; ")[0] for said in (*first, *third)]
    assert beginnings == [
        f"ranks are not compared yet: rank {absent} did not come within 1 seconds" for absent in (2, 1)
    ]
    assert first[0].partition("; ")[2].startswith("waiting for 1 more (see ")
    assert (len(first), second, len(third)) == (1, [], 1)


@needs_torch
def test_without_ranks_it_says_so():
    import megapatch

    with pytest.raises(megapatch.MegapatchError, match=r"after torch\.distributed\.init_process_group"):
        megapatch.assert_consistent()


class NobodyComes:
    """A store in which one rank of two has come, and for whom the other comes after so many waits."""

    def __init__(self, after):
        self.come, self.after, self.waits = 0, after, []

    def add(self, key, number):
        self.come += number
        return self.come

    def compare_set(self, key, old, new):
        self.come = int(new)

    def wait(self, keys, patience):
        self.waits.append(patience.total_seconds())
        if len(self.waits) <= self.after:
            raise RuntimeError


@pytest.mark.parametrize(
    ("patience", "after", "waits", "late"),
    [(20, 9, [20], []), (100, 9, [30, 70], [70]), (100, 1, [30, 70], [70]), (100, 0, [30], [])],
)
def test_that_others_are_late_is_said_once_and_only_where_there_is_time_left(patience, after, waits, late):
    store, said = NobodyComes(after), []
    met = meetings.meet(store, "here", 2, 1, timedelta(seconds=patience), lambda rest: said.append(rest.seconds))
    assert (met, store.waits, said) == (len(waits) > after, waits, late)
