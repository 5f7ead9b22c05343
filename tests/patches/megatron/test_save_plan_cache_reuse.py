"""megatron.save-plan-cache: which plans are reused, by the real dist_checkpointing at 2 ranks.

test_save_plan_cache.py changes what is saved; here a strategy is loaded, fails, is replaced or saves two kinds.
"""

import copy
import dataclasses
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
from rigs.cells import cells_of
from rigs.megatron.options import UNPATCHED, attempt
from rigs.megatron.save import (
    BASE,
    DISTRIBUTED,
    LOCAL,
    MORE,
    SHARED,
    STATE_ON_ONE,
    Saves,
    metadata,
    minor,
    planning,
    prepare,
    strategies,
)


def without_patch(rank, world_size, folder):
    prepare()
    yield "resumed", partial(resumed, rank, folder)


def repaired(rank, world_size, folder):
    prepare()
    others = resumed, in_turn, without_flag, while_writing, after_failure, after_failure_of_all, one_anew, nvrx
    for function in others:
        yield function.__name__, partial(function, rank, folder)
    yield "fields", fields


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
    """By kind of leaf: its fields, and those in which a change is not seen."""
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


unpatched = cells_of(without_patch, 2, folder="unpatched", env=UNPATCHED)
patched = cells_of(repaired, 2, folder="patched")


def test_metadata_of_a_loaded_checkpoint_are_used_and_forgotten_with_the_plans(unpatched, patched):
    for rank, (before, found) in enumerate(zip(unpatched, patched, strict=True)):
        # Megatron compares them with the plans in a collective of its own.
        assert before["resumed"][0] == planning(rank, 0, 1, **LOCAL)
        assert found["resumed"] == (planning(rank, 0, 2, **LOCAL), (None, planning(rank, 1, 1, **LOCAL)))


def test_one_strategy_saves_two_kinds_of_checkpoints_in_turn(patched):
    assert all(found["in_turn"] == [None] * 5 for found in patched)


def test_saves_without_the_flag_are_left_alone_and_their_plans_not_reused(patched):
    for rank, found in enumerate(patched):
        on, off = (None, planning(rank, 1, 1, **LOCAL)), (None, planning(rank, 1, **LOCAL))
        parallel = (None, planning(rank, 1, **LOCAL, **DISTRIBUTED))
        assert found["without_flag"] == [on, off, off, on, off, on, parallel, parallel]


def test_a_checkpoint_that_is_being_written_is_not_touched(patched):
    assert all(found["while_writing"] == (None, None) for found in patched)


def test_after_a_failure_on_one_rank_all_plan_afresh(patched):
    for rank, found in enumerate(patched):
        saves = (None, planning(rank, 0, 1))
        error = "OSError" if rank == 1 else None
        assert found["after_failure"] == (error, planning(rank, 2, 3, **LOCAL), saves, saves)


def test_after_a_failure_on_all_ranks_what_they_planned_is_not_reused(patched):
    for rank, found in enumerate(patched):
        assert found["after_failure_of_all"] == ("OSError", (None, planning(rank, 1, 1, **LOCAL)))


def test_all_plan_afresh_with_a_rank_that_has_not_saved_before(patched):
    for rank, found in enumerate(patched):
        assert found["one_anew"] == [
            (None, planning(rank, 1, 1, **LOCAL)),
            (None, planning(rank, 1, 1)),
            (None, planning(rank, 0, 1)),
        ]


def test_the_cache_of_nvrx_is_kept_and_emptied_likewise(patched):
    assert all(found["nvrx"] == ((True, {}, {}) if minor() >= 17 else None) for found in patched)


def test_every_field_counts_but_the_data(patched):
    for found in patched:
        assert found["fields"] == {
            "ShardedTensor": {"data", "allow_shape_mismatch"},  # which is for loading
            "ShardedObject": {"data"},
            "kind": True,
        }
