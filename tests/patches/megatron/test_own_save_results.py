"""megatron.own-save-results: saves that are given up, fail or overlap, by the real writers at 2 ranks."""

import functools
import gc
import importlib
import os
import shutil
from types import FunctionType, SimpleNamespace

import pytest
import torch
from rigs.cells import cells_of
from rigs.diagnosed_code import made_up, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.megatron.failing_saves import WRITERS
from rigs.megatron.options import UNPATCHED, attempt, quick_writer
from rigs.megatron.save import ALONE, Saves, has_working_writer

from megapatch.patches.megatron import own_save_results
from megapatch.patches.megatron.own_save_results import MEGATRON, NVRX, diagnose
from megapatch.testing import init_parallel

pytestmark = pytest.mark.skipif(not has_working_writer(), reason="0.12's writer does not work with this torch")

# What is saved: sizes and values of tensors, by key.
FIRST = {"a": (4, 1.0), "b": (4, 2.0)}
ORDER = {"b": (4, 12.0), "a": (4, 11.0)}
WIDER = {"a": (6, 21.0), "c": (2, 22.0)}


MODULES = {"mcore": MEGATRON, "nvrx": NVRX}


class GivenUp:
    """Saves by one writer, of which some are not finalized, or finalized out of order."""

    def __init__(self, rank, folder, strategy):
        self.rank, self.strategy = rank, strategy
        self.saves = Saves(rank, f"{folder}/{strategy}", cached=False, writer=strategy)

    def tree(self, content, value=None):
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        ranks = torch.distributed.get_world_size()
        return {
            key: ShardedTensor.from_rank_offsets(
                key, torch.full((size,), number if value is None else value), (0, self.rank, ranks)
            )
            for key, (size, number) in content.items()
        }

    def plan(self, content, at_once=False):
        path, request = self.saves.plan_tree(self.tree(content), at_once=at_once)
        return SimpleNamespace(path=path, request=request, content=content)

    def write(self, planned):
        arguments = list(planned.request.async_fn_args)
        if planned.request.preload_fn:
            arguments[1] = planned.request.preload_fn()
        planned.request.async_fn(*arguments, **planned.request.async_fn_kwargs)

    def finalize(self, planned):
        """Return the error's name, if there is one: on rank 0 alone before 0.17."""
        torch.distributed.barrier()
        errors = [attempt(function)[0] for function in planned.request.finalize_fns]
        torch.distributed.barrier()
        return next(filter(None, errors), None)

    def loaded(self, planned):
        """Return whether what is loaded is what was saved, or else the values or the error."""
        from megatron.core import dist_checkpointing

        torch.distributed.barrier()
        error, state = attempt(dist_checkpointing.load, self.tree(planned.content, value=-1.0), planned.path)
        if error:
            return f"load: {error} {state[-900:]}"
        values = {key: state[key].tolist() for key in planned.content}
        return values == {key: [number] * size for key, (size, number) in planned.content.items()} or values

    def saved(self, content):
        """Save, and load. Megatron's synchronous saves are always by its own writer."""
        if self.strategy == "mcore":
            error, planned = attempt(self.plan, content, at_once=True)
        else:
            planned = self.plan(content)
            self.write(planned)
            error = self.finalize(planned)
        return f"save: {error} {planned}" if error else self.loaded(planned)

    # ---------------------------------------------------------------------------------- the cells
    def abandoned(self):
        """All ranks have written, and nobody finalizes. Two saves follow."""
        self.write(self.plan(FIRST))
        gc.collect()  # the one that was given up
        return self.saved(WIDER), self.saved(ORDER)

    def abandoned_alike(self):
        """The next save has the same keys, in another order."""
        self.write(self.plan(FIRST))
        return self.saved(ORDER)

    def abandoned_by_one_rank(self):
        """Rank 1 gives up before it has written."""
        given_up = self.plan(FIRST)
        if self.rank == 0:
            self.write(given_up)
        return self.saved(WIDER)

    def failed(self):
        """Writing fails for lack of the folder. Return how it ends, and the save after it."""
        failing = self.plan(FIRST)
        torch.distributed.barrier()
        if self.rank == 0:
            shutil.rmtree(failing.path)
        torch.distributed.barrier()
        attempt(self.write, failing)
        torch.distributed.barrier()  # else the folder is there before the other has tried
        os.makedirs(failing.path, exist_ok=True)  # rank 0 writes the common state there, and the others wait
        after = self.saved(WIDER)
        return self.finalize(failing), after

    def overlapping(self, written, finalized):
        """Two saves at the same time, written and finalized in these orders."""
        planned = [self.plan(FIRST), self.plan(WIDER)]
        for number in written:
            self.write(planned[number])
        for number in finalized:
            self.finalize(planned[number])
        return [self.loaded(each) for each in planned]

    def finalized_later(self):
        """After another save, the one that seemed given up is finalized after all."""
        first = self.plan(FIRST)
        self.write(first)
        between = self.saved(WIDER)
        self.finalize(first)
        return between, self.loaded(first)

    def queues(self):
        """Return how many queues are kept: of each of four saves, two of which are finalized."""
        kept, begun = [], len(own_save_results._unread)
        for finalized in (True, False, True, False):
            planned = self.plan(FIRST)
            self.write(planned)
            if finalized:
                self.finalize(planned)
            kept.append(len(own_save_results._unread) - begun)
        return kept


CELLS = ("abandoned", "abandoned_alike", "abandoned_by_one_rank", "failed", "finalized_later")
OVERLAPS = {
    f"written {written}, finalized {finalized}": (written, finalized)
    for written in ((0, 1), (1, 0))
    for finalized in ((0, 1), (1, 0))
}


def job(rank, world_size, folder):
    init_parallel()
    torch.distributed.distributed_c10d._set_pg_timeout(ALONE)  # there is no public way
    for strategy in WRITERS:
        quick_writer(MODULES[strategy])
        saves = GivenUp(rank, folder, strategy)
        for name in CELLS:
            yield (strategy, name), getattr(saves, name)
            quick_writer(MODULES[strategy])
        for name, orders in OVERLAPS.items():
            yield (strategy, name), functools.partial(saves.overlapping, *orders)
            quick_writer(MODULES[strategy])
        yield (strategy, "queues"), saves.queues
        yield (strategy, "diagnoses"), functools.partial(diagnoses, importlib.import_module(MODULES[strategy]))


# ------------------------------------------------------------------------------------------ the diagnosis
def own_queue(self, plan, planner):
    self.results_queue = mp.get_context("spawn").Manager().Queue()  # noqa: F821 (of the module it is put in)


def diagnoses(module):
    writer = module.FileSystemWriterAsync
    # With the module's globals, as upstream's own function would have.
    function = FunctionType(own_queue.__code__, vars(module), own_queue.__name__)
    return verdicts_of(diagnose, module, made_up(writer, "prepare_write_data", function))


DIAGNOSES = {
    "own_queue": ("fixed", "a queue of its own"),
}


# ------------------------------------------------------------------------------------------ the checks
# At one rank: where a single one fails, the others would wait for it.
unpatched = cells_of(job, 1, folder="unpatched", env=UNPATCHED)
patched = cells_of(job, 2, folder="patched")
each_writer = pytest.mark.parametrize("strategy", WRITERS)


@each_writer
def test_without_the_patch_the_saves_after_one_that_was_given_up_cannot_be_loaded(unpatched, strategy):
    assert True not in unpatched[strategy, "abandoned"]
    assert True not in unpatched[strategy, "finalized_later"]
    assert True not in unpatched[strategy, "written (1, 0), finalized (0, 1)"]


@each_writer
@pytest.mark.quick
def test_without_the_patch_values_change_places(unpatched, strategy):
    assert unpatched[strategy, "abandoned_alike"] == {"a": [12.0] * 4, "b": [11.0] * 4}


@each_writer
@pytest.mark.quick
def test_a_save_is_complete_whatever_became_of_those_before(patched, strategy):
    for found in patched:
        assert found[strategy, "abandoned"] == (True, True)
        assert found[strategy, "abandoned_alike"] is True
        assert found[strategy, "abandoned_by_one_rank"] is True
        assert found[strategy, "finalized_later"] == (True, True)


@each_writer
def test_a_save_that_failed_says_so_itself(patched, strategy):
    error, after = patched[0][strategy, "failed"]
    assert error in ("CheckpointException", "RuntimeError")  # the latter up to 0.14
    assert after is True
    assert patched[1][strategy, "failed"][1] is True


@each_writer
@pytest.mark.parametrize("name", OVERLAPS)
def test_saves_at_the_same_time_are_complete(patched, strategy, name):
    for found in patched:
        assert found[strategy, name] == [True, True]


@each_writer
def test_only_queues_of_saves_that_were_given_up_are_kept(patched, strategy):
    for found in patched:
        assert found[strategy, "queues"] == [0, 1, 1, 2]


@each_writer
def test_diagnosis(patched, strategy):
    assert_verdicts(patched[0][strategy, "diagnoses"], DIAGNOSES)
