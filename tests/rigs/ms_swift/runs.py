"""Runs of ms-swift's trainer without megapatch's patches and with them, as cells of one run of two ranks."""

import importlib
import sys

import torch
from torch.distributed.checkpoint import default_planner

from megapatch import apply, restore
from megapatch.weight_sync import gathered_parameters
from rigs.log import Log
from rigs.megatron.gathers import wrong
from rigs.megatron.options import attempt
from rigs.ms_swift.model import LORA
from rigs.ms_swift.trainer import (
    BASE,
    BOTH,
    GRADS,
    STEPS,
    batches,
    beside,
    parameters,
    train,
    trainer_of,
    worker_of,
)
from rigs.releases import statuses


def cells(rank, world_size):
    """Yield the cells of `run_cells`: (name, what), first with nothing patched, then with all patches."""
    importlib.import_module(BASE)
    importlib.import_module(LORA)
    restore()
    yield "setup, without", setup_fails
    yield "cleared by hand, without", lambda: two_setups(by_hand=True)
    yield "fp16, without", lambda: attempt(in_fp16)
    yield "fp16, without the check", fp16_without_check
    for tuner in ("full", "lora"):
        yield f"{tuner}, without", lambda tuner=tuner: synced(tuner)
    yield "patched by ms-swift", patched_by_swift
    apply()
    yield "statuses", own_statuses
    for tuner in ("full", "lora"):
        yield f"{tuner}, with", lambda tuner=tuner: synced(tuner)
    for tuner in ("full", "lora"):
        yield f"{tuner}, in Ray's worker", lambda tuner=tuner: synced_by_worker(tuner)
    yield "two setups", two_setups
    yield "two trains", two_trains
    stages = {"pp": 2, "vpp": 2, "align_grad_reduce": True, "align_param_gather": True}
    yield "two setups, virtual stages", lambda: two_setups(**stages)
    yield "hook of others", hook_of_others
    yield "fp16", in_fp16
    yield "fp16, in a pipeline", lambda: in_fp16(pp=2)
    yield "fp16, saved and evaluated", lambda: in_fp16(interrupts=True)
    restore("megatron.forward-pre-hook")
    yield "fp16, saved and evaluated, without", lambda: attempt(in_fp16, interrupts=True)[0]
    apply()
    yield "not fp16", not_fp16
    yield "patched by both", patched_by_swift
    for again in (1, 2):  # ms-swift patches once more what it has patched
        importlib.import_module("swift.megatron.init").init_megatron_env()
        yield f"statuses, {again} later", own_statuses
    yield "two setups, at last", two_setups


def own_statuses():
    return statuses("megatron", "ms_swift")


# ------------------------------------------------------------------------------------------ weight syncs
def synced(tuner):
    """Train with overlap_param_gather and without.

    Return the fractions of elements that differ: of what vLLM got, by step, and of the parameters at the end; and
    by how much those differ that LoRA does not train.
    """
    plain, trainer = trainer_of(tuner, overlap=GRADS), beside(tuner, overlap=BOTH)
    for one in (plain, trainer):
        one.setup_model_training()
        for step in range(STEPS):
            train(one, step)
        one.finalize_training()
    gathered_parameters(trainer.wrapped_models)
    found, expected = parameters(trainer), parameters(plain)
    frozen = [name for name in expected if tuner == "lora" and "lora" not in name]
    moved = max((float((found[name] - expected[name]).abs().max()) for name in frozen), default=0.0)
    fractions = [wrong(*each) for each in zip(trainer.synced, plain.synced, strict=True)]
    return fractions, wrong(found, expected), moved


def synced_by_worker(tuner):
    """The same of ms-swift's Ray worker, which is told to merge, to send and to unmerge after each step."""
    layout, found = trainer_of, []
    for overlap in (GRADS, BOTH):
        worker = worker_of(layout(tuner, overlap=overlap))
        layout = beside
        worker.setup({"train_iters": STEPS})
        for step in range(STEPS):
            worker.train_step(batches(_data_parallel_rank(), step))
            worker.merge_lora()
            worker.update_weights()
            worker.unmerge_lora()
        gathered_parameters(worker._megatron.wrapped_models)
        found.append((worker.synced, parameters(worker._megatron)))
    (expected, end), (synced_weights, end_with) = found
    return [wrong(*each) for each in zip(synced_weights, expected, strict=True)], wrong(end_with, end)


def _data_parallel_rank():
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_rank()


# ------------------------------------------------------------------------------------------ set up again
def setup_fails():
    trainer = trainer_of(overlap=GRADS)
    trainer.setup_model_training()
    return attempt(trainer.setup_model_training)


def two_setups(by_hand=False, **options):
    """Set up and make a few steps, twice, as a Ray worker that is not finalized in between.

    Return the fraction of the parameters that differ from those of a run without overlap that is set up once.
    """
    layout = {name: options.pop(name) for name in ("pp", "vpp") if name in options}
    trainer, plain = trainer_of(overlap=BOTH, **layout, **options), beside()
    plain.setup_model_training()
    for step in range(2 * STEPS):
        if step % STEPS == 0:
            if by_hand:
                trainer.config.no_sync_func = None
            trainer.setup_model_training()
        train(trainer, step)
        train(plain, step)
    trainer.finalize_training()
    gathered_parameters(trainer.wrapped_models)
    return wrong(parameters(trainer), parameters(plain))


def two_trains():
    """Call train() twice; return the number of steps, and the fraction of the parameters that differ likewise."""
    trainer, plain = trainer_of(overlap=BOTH), beside()
    trainer._prepare_data_iterator = lambda *ignored: (_endless(), None)
    for last in (STEPS, 2 * STEPS):
        trainer.args.train_iters = last
        sys.modules[BASE].BaseMegatronTrainer.train(trainer, None, None)
    plain.args.train_iters = 2 * STEPS
    first = iter(_endless())
    plain.setup_model_training()
    for number in range(2 * STEPS):
        plain.run_train_step(first if number != STEPS else (first := iter(_endless())), None)
    return trainer.state.iteration, wrong(parameters(trainer), parameters(plain))


def _endless():
    for step in range(100):
        yield from batches(_data_parallel_rank(), step)


def hook_of_others():
    trainer = trainer_of(overlap=GRADS)
    trainer.config.no_sync_func = hook = torch.no_grad
    return attempt(trainer.setup_model_training), trainer.config.no_sync_func is hook


def in_fp16(interrupts=False, pp=1):
    """Train in fp16, from the default loss scale until two steps were taken, and save and evaluate in each step.

    Return, by step, the loss scale, how far the learning rate is scheduled, and the norm; what was logged; and the
    fraction of the parameters that differ from those of a trainer that begins with the last loss scale.
    """
    log = Log()
    trainer = trainer_of(dtype="fp16", overlap=BOTH, pp=pp)
    trainer.setup_model_training()
    found, taken = [], 0
    while taken < 2:
        trainer.state.should_save = trainer.state.should_eval = interrupts
        train(trainer, taken)
        taken = trainer.opt_param_scheduler.num_steps // trainer.args.global_batch_size
        scale = float(trainer.optimizer.get_loss_scale())
        found.append((scale, taken, trainer._train_metrics["grad_norm"]))
    plain = beside(dtype="fp16", initial_loss_scale=scale)
    plain.setup_model_training()
    for step in range(taken):
        train(plain, step)
    gathered_parameters(trainer.wrapped_models)
    norm = plain._train_metrics["grad_norm"]
    return found, log.texts, wrong(parameters(trainer), parameters(plain)), norm


def fp16_without_check():
    trainer = trainer_of(dtype="fp16")
    for chunk in trainer.wrapped_models:
        chunk.ddp_config.check_for_nan_in_grad = False
    trainer.setup_model_training()
    return attempt(train, trainer, 0)


def not_fp16():
    """Whether gradients that are not fp16's are still checked, and what ends a step of NaNs."""
    trainer = trainer_of(dtype="bf16")
    trainer.setup_model_training()
    with torch.no_grad():
        next(trainer.unwrapped_models[0].parameters()).fill_(torch.nan)
    return attempt(train, trainer, 0)


# ------------------------------------------------------------------------------------------ beside its own patches
def patched_by_swift():
    """Which functions of torch and Megatron are ms-swift's now."""
    reader = sys.modules["torch.distributed.checkpoint.filesystem"].FileSystemReader
    p2p = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
    functions = {
        "_validate_global_plan": default_planner._validate_global_plan,
        "read_data": reader.read_data,
        "_batched_p2p_ops": p2p._batched_p2p_ops,
    }
    return [name for name, function in functions.items() if function.__module__.startswith("swift.")]
