"""megatron.groups-destroyed: the process groups of layouts that were taken down, at 2 ranks."""

import functools
import importlib
import os
import sys
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

import pytest
import torch
from rigs.cells import run_cells
from rigs.diagnosed_code import made_up, of_a_rank, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.megatron.options import UNPATCHED
from rigs.megatron.process_groups import initialize, resources

from megapatch._mcore import leftover_groups
from megapatch._mcore.process_groups import PARALLEL_STATE, process_groups
from megapatch.patch import unpatched
from megapatch.patches.megatron import groups_destroyed
from megapatch.patches.megatron.groups_destroyed import GROUPS, diagnose
from megapatch.testing import destroy_parallel

CYCLES = 4
WITHOUT = (1, 2, 6)
"""Numbers of layouts that rank 1 sets up before it imports megapatch, of six."""


def cycles():
    """Groups, threads and file descriptors after each initialization, of layouts that take turns."""
    found = []
    for cycle in range(CYCLES):
        state = initialize(tensor_model_parallel_size=1 + cycle % 2)
        torch.distributed.all_reduce(torch.ones(1).cuda(), group=state.get_data_parallel_group())
        found.append(resources())
        destroy_parallel()
    return found


def late(rank, without):
    """Groups after each of six layouts, of which the first ones of rank 1 are set up without the patch."""
    own = torch.distributed.new_group([0, 1])  # so that no layout was begun at this number of groups
    groups_destroyed._layout.forget()  # as in a new process
    counts, first = [], ""
    for layout in range(6):
        state = importlib.import_module("megatron.core.parallel_state")
        patched = rank == 0 or layout >= without
        (state.initialize_model_parallel if patched else unpatched(state.initialize_model_parallel))()
        counts.append(len(process_groups()))
        first = first or state.get_data_parallel_group().group_name
        destroy_parallel()
    torch.distributed.destroy_process_group(own)
    return counts, works({group.group_name: group for group in process_groups()}[first])


def in_vain(rank):
    """Rank 0 alone makes a call that raises before any group is made; both ranks set up layouts around it."""
    counts, errors = [], 0
    for layout in range(4):
        initialize()
        counts.append(len(process_groups()))
        if rank == 0 and layout % 2:
            try:
                initialize()
            except (AssertionError, RuntimeError):
                errors += 1
        destroy_parallel()
    return counts, errors


def works(group):
    ones = torch.ones(1).cuda()
    torch.distributed.all_reduce(ones, group=group)
    return ones.item() == group.size()


def kept_by_one(rank):
    """Rank 0 keeps a group of the last layout, and a user has one of its own: which work after the next one."""
    own = torch.distributed.new_group([0, 1])
    state = initialize()
    of_layout = state.get_data_parallel_group()
    kept = {"model": of_layout} if rank == 0 else None
    name = of_layout.group_name
    destroy_parallel()
    before = len(process_groups())
    del of_layout
    initialize()
    destroy_parallel()
    there = {group.group_name: group for group in process_groups()}
    found = works(own), works(there[name]), len(there) - before
    del kept, there
    initialize()
    destroy_parallel()
    later = len(process_groups()) - before
    torch.distributed.destroy_process_group(own)
    return *found, later


def other_calls():
    """A layout that fails, one that is not taken down, and one that is taken down twice."""
    state, errors = initialize(), []
    count = len(process_groups())
    for sizes in ({"tensor_model_parallel_size": 3}, {}):
        try:
            initialize(**sizes)
        except (AssertionError, RuntimeError) as error:
            errors.append(type(error).__name__)
        assert works(state.get_data_parallel_group())
    destroy_parallel()
    state.destroy_model_parallel()
    assert works(initialize().get_data_parallel_group())
    assert len(process_groups()) == count
    destroy_parallel()
    return len(errors)


def hierarchical():
    """Hierarchical groups, and all groups, of layouts with two levels of context parallelism and without."""
    found = []
    for sizes in ([2, 1], None, [1, 2], None):
        state = initialize(context_parallel_size=2, hierarchical_context_parallel_sizes=sizes)
        groups = state.get_hierarchical_context_parallel_groups(check_initialized=False) or []
        found.append(([group.size() for group in groups], all(map(works, groups)), len(process_groups())))
        del groups
        destroy_parallel()
    return found


def other_world(rank):
    """The default group is destroyed in between, and all others with it."""
    initialize()
    destroy_parallel()
    backend = torch.distributed.get_backend()
    torch.distributed.destroy_process_group()
    store = torch.distributed.FileStore(str(Path(os.environ["STORE"])), 2)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=2)
    state = initialize()
    return works(state.get_data_parallel_group())


def job(rank, world_size):
    yield "cycles", cycles
    yield "hierarchical", hierarchical
    if not UNPATCHED.items() <= os.environ.items():
        yield "kept by one", functools.partial(kept_by_one, rank)
        yield "other calls", other_calls
        yield "in vain", functools.partial(in_vain, rank)
        for without in WITHOUT:
            yield without, functools.partial(late, rank, without)
        yield "other world", functools.partial(other_world, rank)


def test_a_process_does_not_grow():
    for found in run_cells(job, 2, env=UNPATCHED):
        groups, threads, files = zip(*found["cycles"], strict=True)
        assert groups[-1] >= groups[0] + 14 * (CYCLES - 1)
        assert threads[-1] > threads[0]
        assert files[-1] > files[0]

        (_, *later), works, _ = zip(*found["hierarchical"], strict=True)
        assert all(works) and all(later)  # 0.12 adds to them


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    store = tmp_path_factory.mktemp("groups") / "store"
    return run_cells(job, 2, env={"STORE": str(store)})


@pytest.mark.quick
def test_groups_that_nothing_refers_to_are_destroyed(patched):
    for found in patched:
        groups, threads, files = zip(*found["cycles"], strict=True)
        assert groups[2:] == groups[:2]  # the layouts take turns
        for counted in (threads, files):
            assert max(counted[2:]) <= max(counted[:2])
        own_works, kept_works, more, later = found["kept by one"]
        assert own_works
        assert kept_works
        assert (more, later) == (1, 0)  # the one that rank 0 has kept, and then let go
        assert found["other calls"] == 2
        assert found["other world"]


def test_a_layout_has_no_group_of_the_one_before(patched):
    for found in patched:
        sizes, works, groups = zip(*found["hierarchical"], strict=True)
        assert sizes == ([2, 1], [], [1, 2], []) and all(works)
        assert groups[0] == groups[2] > groups[1] == groups[3]


@pytest.mark.parametrize("without", WITHOUT)
def test_a_rank_that_imports_megapatch_later_is_not_waited_for(patched, without):
    """Layouts that both ranks have noted are destroyed; of the others, the groups that both are in stay."""
    for found in patched:
        counts, first_works = found[without]
        assert first_works
        assert counts[: without + 1] == sorted({*counts[: without + 1]})
        assert len({*counts[without + 1 :]}) <= 1


def test_a_call_that_a_rank_makes_alone_and_that_raises_is_not_met(patched):
    for found in patched:
        counts, _ = found["in vain"]
        assert len(set(counts)) == 1
    assert [found["in vain"][1] for found in patched] == [2, 0]


def test_globals_are_put_back_once_and_only_those_that_the_layout_has_set(monkeypatch):
    state = SimpleNamespace(own=0, theirs=0, added_to=[0], table={0: 0}, as_before=[])
    monkeypatch.setitem(sys.modules, PARALLEL_STATE, state)
    names = compile("own, theirs, added_to, table, as_before, gone", "initialize_model_parallel", "exec")
    layout, before = groups_destroyed._Layout(), groups_destroyed._globals_of(FunctionType(names, {}))()
    state.own = state.theirs = 1
    state.added_to.append(1)
    state.table[1] = 1
    layout.end([], before)
    state.theirs = 2
    state.as_before.append(3)
    layout._reset(vars(state))
    assert vars(state) == {"own": 0, "theirs": 2, "added_to": [0], "table": {0: 0}, "as_before": [3]}
    state.own = 1
    layout._reset(vars(state))
    assert state.own == 1


class Group:
    def __init__(self, name):
        self.group_name = name


def test_groups_that_no_rank_needs_are_destroyed_and_others_are_left_alone(monkeypatch):
    """Another rank has "theirs"; "held" is referred to here, "gone" was destroyed, "own" is a user's."""
    world, state = SimpleNamespace(pg_map={}, tags_to_pg={"": [], "tp": []}, pg_default=None), ModuleType("state")
    leftover = [Group(name) for name in ("idle", "held", "theirs", "gone", "idle too")]
    state.groups = [group for group in leftover if group.group_name != "gone"] + [Group("own")]
    state.group, held = state.groups[0], state.groups[1]
    world.pg_map.update(dict.fromkeys(state.groups))
    world.tags_to_pg["tp"].extend(state.groups)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_world", world)
    monkeypatch.setitem(sys.modules, PARALLEL_STATE, state)
    monkeypatch.setattr(leftover_groups, "process_groups", lambda: [None, *state.groups])
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    kept, destroyed = [], []

    def gather(of_ranks, names):
        of_ranks[:] = [names, ["theirs"]]
        kept.extend(names)

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(
        torch.distributed, "destroy_process_group", lambda group: destroyed.append(group.group_name)
    )
    assert leftover_groups.destroy_unused(leftover) == 2
    assert sorted(destroyed) == ["idle", "idle too"] and kept == ["held", "own"]
    assert [group.group_name for group in leftover] == ["held", "theirs"] and held is leftover[0]


def verdicts(rank, world_size):
    module = importlib.import_module("megatron.core.parallel_state")
    functions = {}
    exec(REPAIRED, vars(module), functions)
    return verdicts_of(diagnose, module, made_up(module, "destroy_model_parallel", *functions.values()))


REPAIRED = f"""
def destroys_all():
    global {", ".join(GROUPS)}
    for group in ({", ".join(GROUPS)}):
        torch.distributed.destroy_process_group(group)
    {" = ".join(GROUPS)} = None
"""


def test_diagnosis():
    expected = {"destroys_all": ("fixed", "destroys the process")}
    assert_verdicts(of_a_rank(verdicts), expected)
