"""Loads by a framework: of weights alone, which the next step has to start from, and of bad checkpoints."""

import glob
import os
from unittest import mock

import torch

from megapatch.testing import init_parallel, tiny_gpt
from megapatch.train_step import TrainStep
from rigs.megatron.options import attempt, linear_schedule

OPTIONS = {"dtype": "bf16", "optimizer": "adam", "use_distributed_optimizer": True}
UNDONE, KEPT = [True, False], [True, True]
"""Results of `after_load` without a patch, and with it."""


def after_load(load):
    """Train a model, and let `load(trained, new)` load its weights into a new one, whose learning rate is zero.

    Return whether the new model has those weights after the load, and after one more step.
    """
    init_parallel()
    trained = tiny_gpt(**OPTIONS, lr=0.05)
    for step in range(3):
        trained.train_step(step)
    saved = trained.parameters()
    new = tiny_gpt(**OPTIONS, lr=0.0)
    load(trained, new)
    loaded = new.parameters()
    new.train_step(3)
    return [all(torch.equal(state[name], saved[name]) for name in saved) for state in (loaded, new.parameters())]


BAD = ("open step", "no step of the schedule", "more layers", "truncated")


def bad_loads(rank, folder, save, load):
    """Return the results of `bad_load` by fault."""
    return {fault: bad_load(rank, f"{folder}/{fault}", save, load, fault) for fault in BAD}


def bad_load(rank, folder, save, load, fault):
    """Train, save, train on, and load a checkpoint that is bad, then a good one.

    save, load   called with (model, schedule, path)
    Return the error and its text, how many elements of the weights the bad load has changed, and whether weights
    and the schedule's step are the saved ones after the good load.
    """
    init_parallel()
    model, schedule = _made()
    good, bad = (f"{folder}/{name}" for name in ("good", "bad"))
    for path in (good, bad):
        if rank == 0:
            os.makedirs(path)
    model.train_step(0)
    schedule.step(1)
    torch.distributed.barrier()
    saved = model.parameters()
    save(model, schedule, good)
    _save_bad(rank, model, schedule, bad, save, fault)
    model.train_step(1)
    schedule.step(1)
    before = model.parameters()
    step = TrainStep(model.chunks, model.optimizer, schedule)
    if fault == "open step":
        step.begin()
    outcome = attempt(load, model, schedule, bad)
    if fault == "open step":
        step.abort()
    after = model.parameters()
    changed = sum(int((after[name] != before[name]).sum()) for name in before)
    torch.distributed.barrier()
    load(model, schedule, good)
    found = model.parameters()
    right = schedule.num_steps == 1 and all(torch.equal(found[name], saved[name]) for name in saved)
    return *outcome, changed, right


def _made(**sizes):
    model = tiny_gpt(**OPTIONS, lr=0.05, optim={"min_lr": 0.0}, **sizes)
    return model, linear_schedule(model.optimizer, steps=20, max_lr=0.05)


def _save_bad(rank, model, schedule, path, save, fault):
    if fault == "more layers":
        model, schedule = _made(layers=4)
        model.train_step(0)
    state = schedule.state_dict()
    if fault == "no step of the schedule":
        del state["num_steps"]
    with mock.patch.object(schedule, "state_dict", return_value=state):
        save(model, schedule, path)
    torch.distributed.barrier()
    if fault == "truncated" and rank == 0:
        file = max(glob.glob(f"{path}/**/__1_*.distcp", recursive=True), key=os.path.getsize)
        os.truncate(file, os.path.getsize(file) // 2)
    torch.distributed.barrier()


def assert_bad_ones_raise(found):
    """Check a rank's results of `bad_loads`: what changes nothing, and that a good load makes all right."""
    errors = {fault: (error, text) for fault, (error, text, *_) in found.items()}
    assert errors["open step"][0] == "MisuseError" and "has loaded nothing" in errors["open step"][1]
    assert errors["no step of the schedule"] == ("KeyError", "'num_steps'")
    assert errors["more layers"][0] == errors["truncated"][0] == "CheckpointException"
    changed = {fault for fault, (*_, elements, _) in found.items() if elements}
    assert changed == {"no step of the schedule", "truncated"}
    assert all(right for *_, right in found.values())
