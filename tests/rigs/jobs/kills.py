"""What a rank of a job notes on its way, and where it is killed: the same event in each run, whatever the time.

A step has five events, and so has a save. The whole session of the ranks is killed at one of them; the notes are
in a file by then.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib
import json
import mmap
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter

SAMPLES = 8  # of a step
STEP = ("begun", "half forward", "gradients", "half stepped", "stepped")
SAVE = ("requested", "half written", "written", "described", "tracked")
"""At the second the writer of rank 0 has written, at the third those of all ranks have."""


class Shared(ctypes.Structure):
    """Numbers that a trainer and its writers have in common: some releases start one for each file of a save.

    first    the step with which this life has begun: there is a save after each step
    stepped  how many steps the optimizer has stepped
    writing  how many saves a writer has begun
    """

    _fields_ = [(name, ctypes.c_int) for name in ("first", "stepped", "writing")]


class Follower:
    """Has a rank note what it does, and be killed.

    Args:
        point: an event and its number in this run, counted from 1; or None
        late: a writer begins a save only when the next step's optimizer has stepped
        log: the file
        steps: after how many whole steps the rank ends; or None
    """

    def __init__(self, point, late, log, steps):
        self.point, self.late, self.steps = point and tuple(point), late, steps
        self.counts, self.asked, self.trainer = Counter(), [], os.getpid()
        self.file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.is_first = os.environ["RANK"] == "0"
        self.shared = Shared.from_buffer(mmap.mmap(-1, ctypes.sizeof(Shared)))

    def note(self, **what):
        os.write(self.file, (json.dumps(what) + "\n").encode())

    def reach(self, event):
        self.counts[event] += 1
        if self.is_first and (event, self.counts[event]) == self.point:
            self.note(killed=event)
            os.killpg(0, signal.SIGKILL)

    def install(self):
        from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.models.gpt import GPTModel

        from rigs.jobs.on_cpu import FusedAdam

        # Its code is the same as that of a process that is spawned, which would import torch for each life.
        for module in (multiprocessing, importlib.import_module("torch.multiprocessing")):
            module.get_context = lambda method=None, get=multiprocessing.get_context: get("fork")
        self.around(GPTModel, "forward", before=self.forward)
        self.around(DistributedDataParallel, "finish_grad_sync", before=lambda *_: self.reach("gradients"))
        self.around(FusedAdam, "_step", after=lambda *_: self.half_stepped())
        for name in ("megatron.training", "megatron.bridge.training"):
            if f"{name}.checkpointing" not in sys.modules:
                continue
            training = importlib.import_module(f"{name}.{'train' if 'bridge' in name else 'training'}")
            self.around(training, "train_step", before=self.begin, after=self.step_taken)
        fsync = os.fsync
        os.fsync = lambda file: fsync(file) or self.written(os.readlink(f"/proc/self/fd/{file}"))
        queues, writers = {async_utils.AsyncCallsQueue}, {filesystem_async.FileSystemWriterAsync}
        with contextlib.suppress(ImportError):
            from nvidia_resiliency_ext.checkpointing import async_ckpt

            queues.add(importlib.import_module(f"{async_ckpt.__name__}.core").AsyncCallsQueue)
            writers.add(importlib.import_module(f"{async_ckpt.__name__}.filesystem_async").FileSystemWriterAsync)
        for queue in queues:
            self.around(queue, "schedule_async_request", before=self.request)
            self.around(queue, "maybe_finalize_async_calls", after=self.finalized)
        for writer in writers:
            for name in ("write_preloaded_data_multithread", "write_preloaded_data_multiproc"):
                if hasattr(writer, name):
                    self.around(writer, name, before=self.wait, wrap=staticmethod)
            self.around(
                writer,
                "finish",
                before=lambda *_: self.reach("written"),
                after=lambda *_: self.reach("described"),
            )

    @staticmethod
    def around(owner, name, before=None, after=None, wrap=lambda function: function):
        original = getattr(owner, name)

        @functools.wraps(original)
        def followed(*args, **kwargs):
            if before:
                before(*args)
            result = original(*args, **kwargs)
            if after:
                after(result)
            return result

        setattr(owner, name, wrap(followed))

    # ------------------------------------------------------------------------------------------ a step
    def begin(self, forward_step, data, model, optimizer, scheduler, *others):
        if self.counts["begun"] == self.steps:
            os._exit(0)
        self.step = scheduler.num_steps // SAMPLES
        self.shared.first = self.step - self.counts["begun"]
        self.begun = optimizer, scheduler
        self.halves = Counter()
        self.reach("begun")

    def forward(self, model, *args):
        """A step's second forward has all parameters, where the first gathers them."""
        self.halves["forward"] += 1
        if self.halves["forward"] == 2:
            self.note(step=self.step, state=digest(model, *self.begun))
            self.reach("half forward")

    def half_stepped(self):
        self.halves["stepped"] += 1
        if self.halves["stepped"] == 1:
            self.reach("half stepped")

    def step_taken(self, *args):
        self.shared.stepped += 1
        self.reach("stepped")

    # ------------------------------------------------------------------------------------------ a save
    def wait(self, *args):
        """In the process that writes: there is a save after each step."""
        self.shared.writing += 1
        number = self.shared.writing
        while self.late and self.shared.stepped <= number:
            time.sleep(0.001)

    def written(self, path):
        """In the process that writes: a file of a save is there."""
        _, found, step = os.path.dirname(path).rpartition("iter_")
        if os.getpid() == self.trainer or not found or not self.is_first:
            return
        if ("half written", int(step) - self.shared.first) == self.point:
            self.note(killed="half written")
            os.killpg(0, signal.SIGKILL)

    def request(self, *args):
        self.asked.append(self.step + 1)
        self.reach("requested")

    def finalized(self, calls):
        for number, _ in enumerate(calls, self.counts["tracked"]):
            self.note(finalized=self.asked[number])
        for _ in calls:
            self.reach("tracked")


def digest(model, optimizer, scheduler):
    """Return a digest of all that a step begins with, but for random numbers."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        found.update(name.encode() + bytes_of(parameter))
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in inner.optimizer.param_groups:
            found.update(repr([group.get("step"), group["lr"], group["weight_decay"]]).encode())
            for parameter in group["params"]:
                found.update(bytes_of(parameter))
                for name, value in sorted(inner.optimizer.state[parameter].items()):
                    found.update(name.encode() + bytes_of(value))
    found.update(repr(sorted(scheduler.state_dict().items())).encode())
    return found.hexdigest()


def bytes_of(tensor):
    import torch

    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
