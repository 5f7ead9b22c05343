"""Runs of verl's engine without megapatch's patches for verl and with them, as cells of one run of two ranks."""

import importlib
import random
from unittest import mock

import numpy
import torch

from megapatch import apply, audit, restore
from megapatch.weight_sync import gathered_parameters
from rigs.cells import once
from rigs.collisions import together
from rigs.log import Log
from rigs.megatron.gathers import wrong
from rigs.megatron.options import attempt
from rigs.releases import statuses
from rigs.verl.engine import BOTH, ENGINE, GRADS, STEPS, batch_of, engine_of, loss, parameters, train
from rigs.verl.reads import read_after_steps

SKIPS = {"dtype": "float16", "optimizer": {"initial_loss_scale": 2.0**24, "hysteresis": 1}}
"""An initial loss scale at which the first steps overflow, and that becomes smaller with each of them."""


def cells(rank, world_size):
    """Yield the cells of `run_cells`: (name, what), first with nothing patched, then with all patches."""
    log = Log()
    importlib.import_module(ENGINE)
    restore()
    yield "hooks, without", hooks_fail
    yield "overflow, without", overflow_fails
    yield "seeds, without", lambda: seeds()
    apply()
    yield "statuses", lambda: statuses("verl")
    reference = once(trained, pp=2, vpp=2)
    yield "hooks, two chunks", lambda: (trained(pp=2, vpp=2, overlap=GRADS), reference())
    yield "hooks, gather", lambda: (trained(pp=2, vpp=2, overlap=BOTH), reference())
    yield "hooks, two calls", two_calls
    yield "hooks, of others", hook_of_others
    yield "overflow", lambda: overflow(log)
    yield "overflow, in a pipeline", lambda: overflow(log, pp=2)
    yield "overflow, some", some_mini_batches
    yield "overflow, another failure", another_failure
    yield "seeds", seeds
    yield "gathered, without and with", read_after_steps
    yield "together", lambda: together(patch_as_verl, lambda: trained(overlap=BOTH))


def patch_as_verl():
    """Apply verl's own patches of Megatron, as its engine does where its settings ask for them."""
    patches = importlib.import_module("verl.models.mcore.patch")
    for name in ("apply_patch", "apply_mtp_inference_patch", "apply_patch_megatron_recomputation_backward"):
        getattr(patches, name, lambda: None)()
    importlib.import_module("verl.utils.megatron.router_replay_patch").apply_router_replay_patch()


# ------------------------------------------------------------------------------------------ training hooks
def trained(**options):
    """Train an engine; return losses, gradient norms and parameters."""
    engine = engine_of(**options)
    steps = [train(engine, step) for step in range(STEPS)]
    gathered_parameters(engine.module)
    return (
        [step.get("loss") for step in steps],
        [step.get("metrics", {}).get("grad_norm") for step in steps],
        parameters(engine),
    )


def trained_in_four(rank, world_size):
    """With two data-parallel ranks in each of two stages of two virtual ones: with overlap, and without."""
    return trained(pp=2, vpp=2, overlap=BOTH), trained(pp=2, vpp=2)


def register(engine):
    # By the name under which the engine imported it.
    importlib.import_module(ENGINE).register_megatron_training_hooks(engine.module, engine.optimizer)


def hooks_fail():
    second_chunk = attempt(engine_of, pp=2, vpp=2, overlap=GRADS)
    engine = engine_of(overlap=GRADS)
    return second_chunk, attempt(register, engine)


def two_calls():
    """Register again, with one chunk and with two; return whose hooks the config has."""
    found = {}
    for name, layout in (("one", {}), ("two", {"pp": 2, "vpp": 2})):
        engine = engine_of(overlap=GRADS, **layout)
        register(engine)
        hooks = (engine.tf_config.no_sync_func, engine.tf_config.grad_sync_func)
        each = [hook if isinstance(hook, list) else [hook] for hook in hooks]
        found[name] = (
            [isinstance(hook, list) for hook in hooks],
            [
                [part.__func__.__name__ for part in hook]
                if [part.__self__ for part in hook] == engine.module
                else "of another model"
                for hook in each
            ],
        )
        found[f"{name}, losses"] = train(engine, 0).get("loss") is not None
    return found


def hook_of_others():
    """A no_sync_func that Megatron has not made: verl still refuses it, and it stays."""
    engine = engine_of(overlap=GRADS)
    engine.tf_config.no_sync_func = theirs = mock.sentinel.theirs
    failure = attempt(register, engine)
    return failure, engine.tf_config.no_sync_func is theirs


# ------------------------------------------------------------------------------------------ overflow
def overflow_fails():
    engine = engine_of(**SKIPS)
    before, scale = parameters(engine), float(engine.optimizer.get_loss_scale())
    failure = attempt(train, engine, 0)
    return failure, float(engine.optimizer.get_loss_scale()) < scale, wrong(parameters(engine), before)


def overflow(log, **layout):
    """Train on the same batch until a step is taken. Compare with an engine that begins with that loss scale."""
    engine = engine_of(**SKIPS, **layout)
    before, texts = parameters(engine), len(log.texts)
    skipped, rates = [], []
    for _ in range(20):
        scheduled = engine.lr_scheduler.num_steps
        found = train(engine, 0).get("metrics", {})
        rates.append(engine.lr_scheduler.num_steps - scheduled)
        if rates[-1]:
            break
        skipped.append((found.get("grad_norm"), wrong(parameters(engine), before)))
    scale = 2.0**24 / 2 ** len(skipped)
    reference = engine_of(
        dtype="float16", optimizer={"initial_loss_scale": scale, "hysteresis": 1}, colocated=True, **layout
    )
    expected = train(reference, 0).get("metrics", {})
    return {
        "skipped": skipped,
        "scheduled": rates,
        "scale": (float(engine.optimizer.get_loss_scale()), scale),
        "taken": found,
        "expected": expected,
        "wrong": wrong(parameters(engine), parameters(reference)),
        "moved": wrong(parameters(engine), before),
        "count": (engine.megapatch_skipped_steps, getattr(reference, "megapatch_skipped_steps", 0)),
        "rate": (engine.optimizer.param_groups[0]["lr"], reference.optimizer.param_groups[0]["lr"]),
        "texts": log.texts[texts:],
    }


def some_mini_batches():
    """Mini-batches of an update of which the first is skipped: return the norms, and the schedule's steps."""
    engine = engine_of(dtype="float16")
    step, overflows = engine.optimizer.step, iter([torch.inf])

    def step_of_overflow():
        engine.module[0].buffers[0].grad_data[0] += next(overflows, 0.0)
        return step()

    engine.optimizer.step = step_of_overflow
    scheduled = engine.lr_scheduler.num_steps
    with engine.train_mode():
        norms = [engine.train_batch(batch_of(number), loss())["metrics"]["grad_norm"] for number in range(2)]
    engine.lr_scheduler_step()
    return norms, engine.lr_scheduler.num_steps - scheduled


def another_failure():
    engine = engine_of(dtype="float16")
    engine.optimizer.step = lambda: (False, 1.0, None)
    return attempt(train, engine, 0)


# ------------------------------------------------------------------------------------------ seeds
def seeds():
    """Return the seeds of each stage's engine for Python, NumPy, torch and Megatron's tracker; its draws in the
    first dropout of a step; the seed of a second engine in the same process; and the audit's notes."""
    engine, masks = engine_of(pp=2, model={"hidden_dropout": 0.5}), []
    found = {
        "torch": torch.initial_seed(),
        "numpy": int(numpy.random.get_state()[1][0]),
        "python": random.random(),
    }
    dropout = torch.nn.functional.dropout

    def watched(x, p=0.5, training=True, inplace=False):
        result = dropout(x, p, training, inplace)
        if p:
            masks.append((result.detach() == 0).flatten()[:64])
        return result

    with mock.patch.object(torch.nn.functional, "dropout", watched):
        train(engine, 0)
    type(engine)(engine.model_config, engine.engine_config, engine.optimizer_config, engine.checkpoint_config)
    notes = [note.rule for note in audit.notes()]
    return {**found, "mask": masks[0], "again": torch.initial_seed(), "notes": notes}
