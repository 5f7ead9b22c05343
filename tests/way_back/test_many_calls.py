"""Each operation 300 times in one process: the last calls leave nothing behind, and do no more than early ones.

A call's work is counted in functions that it calls, not timed: that number is the same on each machine.
"""

from __future__ import annotations

import gc
import os
import sys

import pytest
import torch
from rigs.megatron.options import quick_writer
from rigs.megatron.process_groups import resources
from rigs.weight_sync import bracket

from megapatch.testing import run_ranks
from megapatch.weight_sync import gathered_parameters

from .layouts import LAYOUTS
from .operations import operate
from .plan import TRAIN
from .trainer import Trainer

EARLY, LATE = 40, 300
GROWTH = 5120  # KiB of resident memory in 260 calls: the allocator's, of half a gigabyte
LAYOUT = "bf16, sharded, overlaps"
SYNC = "weight sync"
OPERATIONS = ("step", "split step", TRAIN, "evaluation", SYNC, "save", "load", "another layout and back")


def sync(trainer):
    """Read all parameters while generation is paused."""

    def read():
        with gathered_parameters(trainer.model.chunks):
            return [weight.sum() for weight in trainer.model.parameters().values()]

    bracket(lambda: None, lambda: None, read, "with")


def call(trainer, operation, number):
    if operation == SYNC:
        sync(trainer)
    else:
        operate(trainer, operation, number % 5)
    del trainer.slots[1:]  # saves are remembered by the trainer of these tests


def functions_called(function, *args):
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return count


def left(trainer):
    """Return how much of everything there is in this process."""
    gc.collect()
    # Torch keeps an empty list for each process group that there has been.
    objects = [one for one in gc.get_objects() if not (type(one) is list and not one)]
    modules = [module for chunk in trainer.model.chunks for module in chunk.modules()]
    hooks = [hook for module in modules for name, hook in vars(module).items() if name.endswith("_hooks")]
    return {
        "hooks": sum(len(hook) for hook in hooks if hook),
        "groups, threads and files": resources(),
        "tensors": sum(issubclass(type(one), torch.Tensor) for one in objects),
        "objects": len(objects),
        "memory": resident(),
    }


def resident():
    """Return this process's resident memory in KiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def job(rank, world_size, folder):
    quick_writer()
    layout = LAYOUTS[LAYOUT]
    layout.set_up()
    with layout.in_use():
        trainer = Trainer(layout, rank, folder)
        operate(trainer, "step", 0)
        operate(trainer, "save", 0)
        found = {}
        for operation in OPERATIONS:
            if operation == TRAIN and not layout.has_train:
                continue
            pictures = []
            for number in range(1, LATE + 1):
                if number not in (EARLY, LATE):
                    call(trainer, operation, number)
                    continue
                called = functions_called(call, trainer, operation, number)
                pictures.append({"called": called, **left(trainer)})
            found[operation] = pictures
    return found


@pytest.mark.thorough
@pytest.mark.nightly
def test_the_300th_call_finds_and_does_what_the_30th_did(tmp_path):
    for rank in run_ranks(job, 2, str(tmp_path), timeout=900):
        for operation, (early, late) in rank.items():
            assert late.pop("memory") < early.pop("memory") + GROWTH, operation
            assert abs(late.pop("called") - (called := early.pop("called"))) <= called / 1000, operation
            early["objects"] += 1  # itself
            assert late == early, operation
