"""megatron.save-fails-everywhere: saves of which one rank's part fails, by the real code at 2 ranks."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import os
import shutil
from datetime import timedelta
from unittest import mock

import pytest
import torch
from rigs.cells import cells_of
from rigs.megatron.options import UNPATCHED, attempt, quick_writer
from rigs.megatron.save import ALONE, BASE, Saves, has_working_writer, minor, strategies

from megapatch._versions import find_module
from megapatch.patches.megatron._failures import Failure
from megapatch.testing import init_parallel

pytestmark = pytest.mark.skipif(not has_working_writer(), reason="0.12's writer does not work with this torch")

CORE = "megatron.core.dist_checkpointing"
NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt"
SOON = timedelta(seconds=2)
"""How long a rank waits for one that is known not to come."""


WRITERS = ["mcore", *(["nvrx"] if find_module(NVRX) and minor() >= 17 else [])]
"""Whose asynchronous saves there are: from 0.17 on Megatron takes NVRx's, too."""


def full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def wait_until(limit):
    torch.distributed.distributed_c10d._set_pg_timeout(limit)  # there is no public way


def no_folder_for(module, name):
    """Give a file a name in a folder that does not exist. A FileNotFoundError, where it is written."""
    module = importlib.import_module(f"{CORE}.{module}")
    return mock.patch.object(module, name, f"gone/{getattr(module, name)}")


NOTHING = contextlib.nullcontext()


class Failing:
    """Saves of which a part fails on some ranks, by one queue."""

    def __init__(self, rank, folder, writer="mcore"):
        self.rank, self.writer = rank, writer
        package = NVRX if writer == "nvrx" else f"{CORE}.strategies"
        self.module = importlib.import_module(f"{package}.filesystem_async")
        quick_writer(self.module.__name__)
        quick_writer(f"{CORE}.strategies.filesystem_async")
        queues = importlib.import_module(f"{package}.{'core' if writer == 'nvrx' else 'async_utils'}")
        self.queue = queues.AsyncCallsQueue(persistent=False)
        self.saves = Saves(rank, f"{folder}/{writer}", cached=False, writer=writer)
        self.ran = []

    def plan(self, finalize_fns=(), **options):
        planned = self.saves.plan(BASE, **options)
        for function in finalize_fns:
            planned.request.add_finalize_fn(function)
        return planned

    def at_once(self):
        self.plan(at_once=True)

    def later(self, *finalize_fns):
        """Save by the queue, with further functions to finalize with."""
        self.queue.schedule_async_request(self.plan(finalize_fns).request)
        self.queue.maybe_finalize_async_calls(blocking=True)

    def next_one(self):
        """Return whether saves go on: synchronous, and by the queue, which has forgotten the one that failed."""
        waiting = self.queue.get_num_unfinalized_calls()
        planned = self.plan(at_once=True)
        found = [waiting, self.saves.load(planned)]
        planned = self.plan([lambda: self.ran.append("the next")])
        self.queue.schedule_async_request(planned.request)
        self.queue.maybe_finalize_async_calls(blocking=True)
        return [*found, self.saves.load(planned), self.ran]

    def failed(self, save, *arguments, changed=NOTHING):
        """Return the error of a save, while something is changed, and how it goes on."""
        with changed:
            error = attempt(save, *arguments)
        return (*error, self.next_one())

    # ---------------------------------------------------------------------------------- what fails
    def without_metadata(self, save):
        # Synchronous saves are always by Megatron's own writer.
        module = self.module if save == self.later else strategies("filesystem_async")
        return self.failed(save, changed=mock.patch.object(module.FileSystemWriterAsync, "finish", full_disk))

    def without_config(self, save):
        return self.failed(save, changed=no_folder_for("core", "CONFIG_FNAME"))

    def without_manifest(self, save):
        """Save with hashes of all files, from 0.17.1 on."""
        from megatron.core import dist_checkpointing

        hashed = functools.partial(dist_checkpointing.save, verify_integrity=True)
        with mock.patch.object(dist_checkpointing, "save", hashed):
            return self.failed(save, changed=no_folder_for("validation", "INTEGRITY_FNAME"))

    def in_trainers_function(self, ranks):
        """Fail in the first of the trainer's own functions on these ranks. The others have fewer of them."""
        here = [full_disk] if self.rank in ranks else []
        return self.failed(self.later, *here, lambda: self.ran.append("the trainer's"))

    def without_results(self):
        """Rank 1 cannot read what its writer has written."""
        writer = strategies("filesystem_async").FileSystemWriterAsync
        fails = mock.patch.object(writer, "retrieve_write_results", full_disk)
        return self.failed(self.at_once, changed=fails if self.rank == 1 else NOTHING)

    def unwritten(self):
        """Rank 0 has nowhere to write."""
        planned = self.plan()
        torch.distributed.barrier()
        if self.rank == 0:
            shutil.rmtree(planned.path)
        torch.distributed.barrier()
        self.queue.schedule_async_request(planned.request)
        return self.failed(functools.partial(self.queue.maybe_finalize_async_calls, blocking=True))

    def interrupted(self):
        """Both ranks get a signal in a function of the trainer. Return how often they meet after it, too."""
        met = []

        def interrupt():
            met.clear()
            raise SystemExit

        reduce = torch.distributed.all_reduce

        def all_reduce(*args, **kwargs):
            met.append("all_reduce")
            return reduce(*args, **kwargs)

        counted = mock.patch.object(torch.distributed, "all_reduce", all_reduce)
        return (*self.failed(self.later, interrupt, changed=counted), len(met))

    def asked(self):
        """Return how often the ranks ask each other in a save at once, and in one by the queue."""
        asked, ask = [], Failure._ranks_failed

        def ranks_failed(*args):
            asked[-1] += 1
            return ask(*args)

        with mock.patch.object(Failure, "_ranks_failed", ranks_failed):
            for save in (self.at_once, self.later):
                asked.append(0)
                save()
        return asked


# ------------------------------------------------------------------------------------------ without the patch
class Waiting(Failing):
    """The same, where a rank that waits for one that has failed gives up soon."""

    def metadata(self):
        wrapper = importlib.import_module("torch.distributed.checkpoint.utils")._DistWrapper
        gather = wrapper.gather_object

        def gather_object(*args):
            found = gather(*args)
            if self.rank == 1:
                wait_until(SOON)
            return found

        with (
            mock.patch.object(wrapper, "gather_object", gather_object),
            mock.patch.object(self.module.FileSystemWriterAsync, "finish", full_disk),
        ):
            return attempt(self.at_once)

    def config(self):
        planned = self.plan()
        tensors, config, *_ = planned.request.finalize_fns
        arguments = list(planned.request.async_fn_args)
        if planned.request.preload_fn:
            arguments[1] = planned.request.preload_fn()
        planned.request.async_fn(*arguments, **planned.request.async_fn_kwargs)
        tensors()
        if self.rank:
            wait_until(SOON)
        with no_folder_for("core", "CONFIG_FNAME"):
            return attempt(config)

    def trainers_function(self):
        return attempt(self.later, functools.partial(wait_until, SOON) if self.rank else full_disk)


def new_world(rank, world_size, folder, name):
    """Make a new default group: one in which a rank has given up is of no use any more."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.makedirs(folder, exist_ok=True)
    store = torch.distributed.FileStore(f"{folder}/{name}", world_size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=ALONE)


def waiting(rank, world_size, folder):
    init_parallel()
    for name in ("metadata", "config", "trainers_function"):
        new_world(rank, world_size, f"{folder}/worlds", name)
        yield f"{name}, without the patch", getattr(Waiting(rank, f"{folder}/{name}"), name)


def failing(rank, world_size, folder):
    init_parallel()
    wait_until(ALONE)
    hashed = hasattr(importlib.import_module(f"{CORE}.validation"), "INTEGRITY_FNAME")
    for writer in WRITERS:
        here = Failing(rank, folder, writer)
        for when, save in (("later", here.later), ("at once", here.at_once)):
            yield (writer, when, "metadata"), functools.partial(here.without_metadata, save)
            yield (writer, when, "config"), functools.partial(here.without_config, save)
            if hashed:
                yield (writer, when, "manifest"), functools.partial(here.without_manifest, save)
        yield (writer, "trainer's"), functools.partial(here.in_trainers_function, {0})
        yield (writer, "trainer's of both"), functools.partial(here.in_trainers_function, {0, 1})
        yield (writer, "results"), here.without_results
        yield (writer, "unwritten"), here.unwritten
        yield (writer, "interrupted"), here.interrupted
        yield (writer, "asked"), here.asked


unpatched = cells_of(waiting, 2, folder="unpatched", env=UNPATCHED)
patched = cells_of(failing, 2, folder="patched")
each_writer = pytest.mark.parametrize("writer", WRITERS)


# ------------------------------------------------------------------------------------------ the checks
FULL, GONE = ("OSError", "No space left on device"), ("FileNotFoundError", "gone/")


@pytest.mark.parametrize("name", ["metadata", "config", "trainers_function"])
def test_without_the_patch_a_rank_waits_for_one_that_has_failed(unpatched, name):
    (error, _), (of_other, waited) = (found[f"{name}, without the patch"] for found in unpatched)
    assert error == (GONE if name == "config" else FULL)[0]
    assert of_other == "RuntimeError"
    assert "imed out" in waited


@each_writer
@pytest.mark.parametrize("when", ["later", "at once"])
@pytest.mark.parametrize(("what", "fails"), [("metadata", FULL), ("config", GONE), ("manifest", GONE)])
def test_a_save_that_fails_on_one_rank_fails_on_the_others(patched, writer, when, what, fails):
    if what == "manifest" and (writer, when, what) not in patched[0]:
        pytest.skip("this Megatron has no manifests")
    assert_failed_everywhere([found[writer, when, what] for found in patched], *fails)


@each_writer
def test_the_same_in_a_function_of_the_trainers(patched, writer):
    ended = [found[writer, "trainer's"] for found in patched]
    assert_failed_everywhere(ended, *FULL)
    assert [ran.count("the trainer's") for _, _, (*_, ran) in ended] == [0, 1]


def assert_failed_everywhere(ended, own, text):
    (error, found, after), (of_other, of_others, after_others) = ended
    assert (error, of_other) == (own, "MegapatchError")
    assert text in found
    assert f"the save failed on another rank: rank 0 raised {own}: " in of_others
    assert text in of_others
    assert_goes_on(after, after_others)


def assert_goes_on(*ranks):
    for waiting, *lost, _ in ranks:
        assert waiting == 0  # to be finalized
        assert lost == [None, None]  # of a synchronous save, and of one by the queue


@each_writer
def test_each_rank_that_failed_raises_its_own_error(patched, writer):
    for found in patched:
        error, text, after = found[writer, "trainer's of both"]
        assert (error, text) == ("OSError", "[Errno 28] No space left on device")
        assert_goes_on(after)


@each_writer
@pytest.mark.parametrize("what", ["results", "unwritten"])
def test_what_upstream_raises_on_rank_0_is_raised_as_the_same_error(patched, writer, what):
    (error, found, after), (of_other, _, after_others) = (ranks[writer, what] for ranks in patched)
    assert error == of_other == "CheckpointException"
    assert ("No space left on device" if what == "results" else "Worker failure") in found
    assert_goes_on(after, after_others)


@each_writer
def test_an_exit_is_not_waited_with(patched, writer):
    for found in patched:
        error, _, after, met = found[writer, "interrupted"]
        assert (error, met) == ("SystemExit", 0)
        assert_goes_on(after)


@each_writer
def test_the_costs_are_those_that_the_patch_states(patched, writer):
    for found in patched:
        assert found[writer, "asked"] == [2 if minor() >= 15 else 3, 4]
