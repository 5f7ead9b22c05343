"""Saves of which a part fails on some ranks, by the real dist_checkpointing and its queue at 2 ranks."""

import contextlib
import errno
import functools
import importlib
import os
import shutil
from unittest import mock

import torch

from megapatch._python.finding import find_module
from megapatch.patches.megatron.save_fails_everywhere import Failure
from rigs.log import Log
from rigs.megatron.options import attempt, quick_writer
from rigs.megatron.save import BASE, Saves, minor, strategies

CORE = "megatron.core.dist_checkpointing"
NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt"
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


def has_manifests():
    return hasattr(importlib.import_module(f"{CORE}.validation"), "INTEGRITY_FNAME")


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
        self.left = []  # files of the save that failed last

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
        newest = max(os.listdir(self.saves.folder), key=int)
        self.left = os.listdir(f"{self.saves.folder}/{newest}")
        return (*error, self.next_one())

    # ---------------------------------------------------------------------------------- what fails
    def without_metadata(self, save):
        # Synchronous saves are always by Megatron's own writer.
        module = self.module if save == self.later else strategies("filesystem_async")
        return self.failed(save, changed=mock.patch.object(module.FileSystemWriterAsync, "finish", full_disk))

    def without_config(self, save):
        with self.hashed():
            return self.failed(save, changed=no_folder_for("core", "CONFIG_FNAME"))

    def without_manifest(self, save):
        with self.hashed():
            return self.failed(save, changed=no_folder_for("validation", "INTEGRITY_FNAME"))

    def hashed(self):
        """Save with hashes of all files, from 0.17.1 on."""
        from megatron.core import dist_checkpointing

        if not has_manifests():
            return NOTHING
        save = functools.partial(dist_checkpointing.save, verify_integrity=True)
        return mock.patch.object(dist_checkpointing, "save", save)

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

    def logged(self):
        """Return what is logged when the metadata cannot be written."""
        log = Log()
        self.without_metadata(self.later)
        return log.texts

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
