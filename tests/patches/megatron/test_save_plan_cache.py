"""megatron.save-plan-cache: saves that reuse a plan, by the real dist_checkpointing at 2 ranks.

What is saved changes; and a strategy is loaded, fails, is replaced or saves two kinds.
"""

import copy
import dataclasses
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from rigs.cells import cells_of
from rigs.imported import run_with_megatron
from rigs.megatron.options import UNPATCHED, attempt
from rigs.megatron.save import (
    BASE,
    DISTRIBUTED,
    LOCAL,
    MORE,
    SHARED,
    STATE_ON_ONE,
    TENSOR_ON_ONE,
    Saves,
    metadata,
    minor,
    planning,
    prepare,
    strategies,
)

from megapatch.patches.megatron.save_plan_cache import _changed_anywhere
from megapatch.testing import RanksFailed

# What is saved, by the names of its parts: first and until the plan is validated, and then.
CHANGES = {
    "unchanged": (BASE, BASE),
    "added on one rank": (BASE, STATE_ON_ONE),
    "removed on all": (MORE, BASE),
    "wider": (BASE, {**BASE, "shared": {"replicated": True, "size": 6}}),
    "another dtype": (BASE, {**BASE, "weights": {"dtype": torch.float64}}),
    "another offset": (BASE, {**BASE, "weights": {"swapped": True}}),
}
# Without the patch one rank fails here, and the other waits for it.
ON_ONE = {
    "removed on one rank": (STATE_ON_ONE, BASE),
    "another replica": (BASE, {**BASE, "shared": {"replicated": True, "main": 1}}),
}
# With the distribution of --ckpt-fully-parallel-save.
PARALLEL = {
    "unchanged": (BASE, BASE),
    "added": (BASE, SHARED),
    "added on one rank": (BASE, TENSOR_ON_ONE),
    "removed on one rank": (TENSOR_ON_ONE, BASE),
}


# ------------------------------------------------------------------------------------------ without the patch
def defects(rank, world_size, folder):
    prepare()
    found = {name: Saves(rank, folder).change(*parts, saves=1) for name, parts in CHANGES.items()}
    found["parallel"] = Saves(rank, folder, parallel=True).change(*PARALLEL["added"], saves=1)
    torch.save(found, f"{folder}/found-{rank}")
    saves = Saves(rank, folder)
    saves.plan_often(STATE_ON_ONE)
    saves.plan(BASE).request.execute_sync()


def resuming(rank, world_size, folder):
    prepare()
    yield "resumed", partial(resumed, rank, folder)


# ------------------------------------------------------------------------------------------ with it
def loaded(rank, folder):
    """A new strategy that has the metadata of a loaded checkpoint."""
    planned = Saves(rank, folder).plan(BASE)
    planned.request.execute_sync()
    saves = Saves(rank, folder)
    saves.base.cached_global_metadata = metadata(planned.path)
    return saves


def resumed(rank, folder):
    saves = loaded(rank, folder)
    return saves.plan_often(BASE, times=1), saves.save(SHARED)


def in_turn(rank, folder):
    """Two kinds of checkpoints by one strategy, each written at once."""
    saves = Saves(rank, folder)
    return [saves.load(saves.plan(parts, at_once=True)) for parts in (MORE, BASE, BASE, MORE, BASE)]


def without_flag(rank, folder):
    """Saves without the flag are left alone, and their plans not reused."""
    saves = Saves(rank, folder)
    found = [saves.save(BASE)]
    for flag, parts in ((False, MORE), (False, BASE), (True, MORE), (False, BASE), (True, MORE)):
        saves.base.use_cached_ckpt_structure = flag
        found.append(saves.save(parts))
    saves = Saves(rank, folder, parallel=True)
    saves.base.use_cached_ckpt_structure = saves.strategy.do_cache_distribution = False
    return [*found, saves.save(BASE), saves.save(MORE)]


def while_writing(rank, folder):
    """Something new is saved while what has been planned before is still being written."""
    saves, queue = Saves(rank, folder), strategies("async_utils").AsyncCallsQueue()
    saves.plan_often(BASE)
    first = saves.plan(BASE)
    queue.schedule_async_request(first.request)
    second = saves.plan(STATE_ON_ONE)
    for _ in range(2):
        queue.maybe_finalize_async_calls(blocking=True)
        if not queue.call_idx:
            queue.schedule_async_request(second.request)
    return saves.load(first), saves.load(second)


def after_failure(rank, folder):
    """One rank fails in its first save, after planning; the other does not."""
    saves, writer = loaded(rank, folder), strategies("filesystem_async").FileSystemWriterAsync
    with mock.patch.object(writer, "prepare_write_data", autospec=True) as prepare_write_data:
        prepare_write_data.side_effect = OSError if rank == 1 else None
        error, _ = attempt(saves.plan, BASE)
    return error, *saves.change(BASE, BASE)


def after_failure_of_all(rank, folder):
    """All fail as they save something else, once it is planned."""
    saves = Saves(rank, folder)
    saves.plan_often(BASE)
    with mock.patch.object(type(saves.base), "_get_save_and_finalize_callbacks", side_effect=OSError):
        error, _ = attempt(saves.plan, MORE)
    return error, saves.save(BASE)


def one_anew(rank, folder):
    """One rank has a new strategy, which has not saved yet."""
    saves = Saves(rank, folder)
    saves.plan_often(BASE)
    if rank == 1:
        saves = Saves(rank, folder)
    return [saves.save(BASE) for _ in range(3)]


def nvrx(rank, folder):
    """Return the state of NVRx's cache (a made-up one) when nothing changes, when something does, and if one is
    there although no save is known."""
    saves, late = Saves(rank, folder), Saves(rank, folder)
    if not hasattr(saves.base, "_metadata_cache"):
        return None
    saves.plan(BASE)
    saves.base._metadata_cache = late.base._metadata_cache = cache = SimpleNamespace(plan="an old one")
    saves.plan(BASE)
    kept = saves.base._metadata_cache is cache
    saves.plan(MORE)
    late.plan(BASE)
    return kept, vars(saves.base._metadata_cache), vars(late.base._metadata_cache)


def fields():
    """By kind of leaf: the fields in which a change is not seen."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    from megapatch._mcore.sharded_leaves import structure

    leaves = ShardedTensor.from_rank_offsets("a", torch.ones(4)), ShardedObject("a", 1, (1,), (0,))
    found = {}
    for leaf in leaves:
        unseen = set()
        for field in dataclasses.fields(leaf):
            other = copy.copy(leaf)
            setattr(other, field.name, "another")
            if structure({"a": [leaf]}) == structure({"a": [other]}):
                unseen.add(field.name)
        found[type(leaf).__name__] = unseen
    other = type("Other", (ShardedObject,), {})("a", 1, (1,), (0,))
    found["kind"] = structure([leaves[1]]) != structure([other])
    return found


PROGRAMS = in_turn, without_flag, while_writing, after_failure, after_failure_of_all, one_anew, nvrx


def repaired(rank, world_size, folder):
    prepare()
    for name, parts in {**CHANGES, **ON_ONE}.items():
        yield name, lambda parts=parts: Saves(rank, folder).change(*parts)
    for name, parts in PARALLEL.items():
        yield ("parallel", name), lambda parts=parts: Saves(rank, folder, parallel=True).change(*parts)
    for function in (resumed, *PROGRAMS):
        yield function.__name__, partial(function, rank, folder)
    yield "fields", fields


@pytest.fixture(scope="module")
def unpatched(folder):
    """Return each rank's findings, and how the last of it ended."""
    (folder / "unpatched").mkdir()
    with pytest.raises(RanksFailed) as failed:
        run_with_megatron(defects, 2, f"{folder}/unpatched", env=UNPATCHED)
    return [torch.load(folder / f"unpatched/found-{rank}") for rank in range(2)], failed.value


resumed_without = cells_of(resuming, 2, folder="resumed", env=UNPATCHED)
patched = cells_of(repaired, 2, folder="patched")


# ------------------------------------------------------------------------------------------ without the patch
LOST = {
    "added on one rank": "Missing key in checkpoint state_dict: new/shard_0_1",
    "removed on all": "ValueError: Could not find FQN: 'new'",
    "wider": "Global shape mismatch for loaded (torch.Size([4])) and expected ((6,)) tensor for key shared",
    "another dtype": "weights is torch.float32 by its metadata",
    "another offset": "Could not find shard at" if minor() < 15 else "weights is tensor",
    "parallel": "new from model not in state dict",
}


@pytest.mark.parametrize("name", LOST)
@pytest.mark.quick
def test_without_the_patch_a_change_is_lost(unpatched, name):
    _, saves = zip(*[found[name] for found in unpatched[0]], strict=True)
    # Where each rank loads on its own (from 0.18 on), one that lacks nothing does not know.
    assert any(LOST[name] in problem for problem, _ in saves if problem)
    assert all(calls == {} for _, calls in saves)


def test_without_the_patch_what_is_gone_on_one_rank_hangs_the_other(unpatched):
    _, failed = unpatched
    assert list(failed.failures) == [1]
    assert "ValueError: Could not find FQN: 'new/shard_0_1'" in failed.failures[1]
    assert "execute_sync" in failed.waiting[0]


# ------------------------------------------------------------------------------------------ with it
def test_an_unchanged_structure_is_planned_once_as_without_the_patch(unpatched, patched):
    for rank, (before, found) in enumerate(zip(unpatched[0], patched, strict=True)):
        assert before["unchanged"] == (planning(rank, 2, **LOCAL), (None, {}))
        saves = (None, planning(rank, 0, 1))
        assert found["unchanged"] == (planning(rank, 2, 3, **LOCAL), saves, saves)


@pytest.mark.parametrize("name", [name for name in (*CHANGES, *ON_ONE) if name != "unchanged"])
@pytest.mark.quick
def test_a_change_is_planned_once_by_all_ranks_and_saved(patched, name):
    for rank, found in enumerate(patched):
        assert found[name] == (
            planning(rank, 2, 3, **LOCAL),
            (None, planning(rank, 1, 1, **LOCAL)),
            (None, planning(rank, 1, 1)),
        )


@pytest.mark.parametrize("name", PARALLEL)
def test_a_change_is_distributed_once_by_all_ranks_and_saved(patched, name):
    afresh = {**LOCAL, **DISTRIBUTED}
    for rank, found in enumerate(patched):
        changed = name != "unchanged"
        assert found["parallel", name] == (
            planning(rank, 2, 6, **afresh),
            (None, planning(rank, changed, 2, **(afresh if changed else {}))),
            (None, planning(rank, changed, 2)),
        )


def of_256_ranks(tensor, op=torch.distributed.ReduceOp.SUM):
    """Reduce what 256 ranks alike hold: in 8 bits their sum is 0."""
    if op == torch.distributed.ReduceOp.SUM:
        tensor.mul_(torch.tensor(256).to(tensor.dtype))


def test_a_change_on_256_ranks_is_a_change():
    with (
        mock.patch("torch.distributed.get_backend", return_value="gloo"),
        mock.patch("torch.distributed.all_reduce", of_256_ranks),
    ):
        assert _changed_anywhere(SimpleNamespace(), [("a",)], cached=True)


# ------------------------------------------------------------------------------------------ which are reused
def test_metadata_of_a_loaded_checkpoint_are_used_and_forgotten_with_the_plans(resumed_without, patched):
    for rank, (before, found) in enumerate(zip(resumed_without, patched, strict=True)):
        # Megatron compares them with the plans in a collective of its own.
        assert before["resumed"][0] == planning(rank, 0, 1, **LOCAL)
        assert found["resumed"] == (planning(rank, 0, 2, **LOCAL), (None, planning(rank, 1, 1, **LOCAL)))


def found_on(rank):
    """By program: what it finds on a rank."""
    afresh, kept = planning(rank, 1, 1, **LOCAL), planning(rank, 0, 1)
    on, off = (None, afresh), (None, planning(rank, 1, **LOCAL))
    parallel = (None, planning(rank, 1, **LOCAL, **DISTRIBUTED))
    failed = "OSError" if rank == 1 else None
    return {
        "in_turn": [None] * 5,
        "without_flag": [on, off, off, on, off, on, parallel, parallel],
        "while_writing": (None, None),
        "after_failure": (failed, planning(rank, 2, 3, **LOCAL), (None, kept), (None, kept)),
        "after_failure_of_all": ("OSError", on),
        "one_anew": [on, (None, planning(rank, 1, 1)), (None, kept)],
        "nvrx": (True, {}, {}) if minor() >= 17 else None,
        "fields": {
            "ShardedTensor": {"data", "allow_shape_mismatch"},  # which is for loading
            "ShardedObject": {"data"},
            "kind": True,
        },
    }


@pytest.mark.parametrize("name", [*(program.__name__ for program in PROGRAMS), "fields"])
def test_plans_that_hold_are_reused_and_no_others(patched, name):
    for rank, found in enumerate(patched):
        assert found[name] == found_on(rank)[name]
