"""Runs of AReaL's engine without megapatch's patches and with them, as cells of one run of two ranks."""

import importlib
import tempfile
from unittest import mock

import torch

from megapatch import apply, restore
from rigs.areal.engine import (
    BOTH,
    CHECKPOINTER,
    ENGINE,
    GRADS,
    ROLLOUT,
    STEPS,
    engine_of,
    evaluate,
    parameters,
    train,
)
from rigs.areal.updates import Servers, checkpoint, update
from rigs.log import Log
from rigs.megatron.gathers import wrong
from rigs.megatron.options import attempt, quick_writer
from rigs.releases import statuses

READS = {
    "broadcast": lambda engine: update(engine, Servers()),
    "disk": lambda engine: update(engine, Servers(), "disk"),
    "checkpoint": checkpoint,
}
EXPERTS = {
    "experts": 2,
    "moe_aux_loss_coeff": 10.0,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_router_topk": 1,
}
SCALE = 1024.0
alive = []
"""Servers, which survive a failure."""


def cells(rank, world_size):
    """Yield the cells of `run_cells`: (name, what), first with nothing patched, then with all patches."""
    importlib.import_module(ENGINE)
    importlib.import_module(ROLLOUT)
    importlib.import_module(CHECKPOINTER)
    restore()
    yield from programs(", without", ", without")
    apply()
    yield "statuses", statuses
    yield from programs(", with", "")
    yield "own hook", own_hook


def programs(after_reads, after_others):
    """Yield the cells that run both without the patches and with them; their names end with these texts."""
    for name in READS:
        yield f"{name}{after_reads}", lambda name=name: read_after_steps(name)
    for program in (recovered, seeds, evaluated, failures):
        yield f"{program.__name__}{after_others}", program
    yield f"router{after_others}", router_gradients
    yield f"dense{after_others}", lambda: gradients(SCALE)


def read_after_steps(name):
    """Return the fraction of the elements that is old, by step, and of the parameters that differ at the end."""
    engine, plain = engine_of(BOTH), engine_of(GRADS, beside=True)
    fractions = []
    for step in range(STEPS):
        train(plain, step)
        train(engine, step)
        fractions.append(wrong(READS[name](engine), READS[name](plain)))
    engine.model[0].start_param_sync(force_sync=True)
    return fractions, wrong(parameters(engine), parameters(plain))


def recovered():
    """Train, save, and load in another engine; return the save's error, or what a rank has of Adam's moments.

    Of the moments: how many were saved, how many are the same after the load; and whether the weights differ.
    """
    module = importlib.import_module(CHECKPOINTER)
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder, 0)
    quick_writer()
    no_streams = mock.patch.multiple(  # on CPU there are none of CUDA's
        module.MegatronCheckpointManager, get_rng_state=lambda *ignored: [0], load_rng_states=lambda *ignored: None
    )
    with no_streams:
        saved, loaded = engine_of(dtype="bfloat16"), engine_of(dtype="bfloat16", beside=True)
        for step in range(3):
            train(saved, step)
        error = attempt(saved.checkpointer.save_checkpoint, folder[0])
        if error[0]:
            return error
        # As with Transformer Engine's optimizer: no step of each parameter, and a state before the first step.
        without_steps = mock.patch.object(torch.optim.Adam, "__setstate__", torch.optim.Optimizer.__setstate__)
        with mock.patch("megatron.core.optimizer.distrib_optimizer.HAVE_APEX_OR_TE", True), without_steps:
            loaded.checkpointer.load_checkpoint(folder[0])
    kept, found = states(saved).values(), states(loaded).values()
    same = sum(
        name in after and torch.equal(before[name], after[name])
        for before, after in zip(kept, found, strict=True)
        for name in ("exp_avg", "exp_avg_sq")
    )
    return 2 * len(kept), same, wrong(parameters(loaded), parameters(saved))


def states(engine):
    optimizer = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])[0].optimizer
    return optimizer.state


def evaluated():
    """Return the loss of the same samples in one and in two microbatches."""
    engine = engine_of(GRADS)
    return [evaluate(engine, count) for count in (1, 2)]


def seeds():
    module, found = importlib.import_module(ENGINE), []
    with mock.patch.object(module.tensor_parallel, "model_parallel_cuda_manual_seed", found.append):
        engine_of(pp=2)
    return found


def failures():
    """Let rank 0 update the weights by servers that fail in one call.

    Return, by that call: the exception, all calls, the ERRORs, and whether the lock is still held.
    """
    found, engine = {}, engine_of(GRADS)
    for kind, fails in (("xccl", "pause"), ("xccl", "update"), ("xccl", "continue"), ("disk", "disk")):
        if torch.distributed.get_rank():
            continue  # it would wait for rank 0 until the timeout
        log, servers = Log(), Servers(fails)
        alive.append(servers)
        with mock.patch("torch.distributed.barrier"):
            failed = attempt(update, engine, servers, kind)
        if held := engine.engine_lock.token is not None:
            engine.engine_lock.release()
        texts = [text for text in log.texts if "weight sync" in text]
        found[fails] = failed, list(servers.calls), texts, held
        if fails == "continue":  # with the patch as well, such servers stay paused until somebody starts them
            servers.fails = None
            servers.continue_generation()
    torch.distributed.barrier()
    return found


def gradients(scale, **config):
    """Return the gradients that the optimizer gets in a step of fp16 with this loss scale, divided by it."""
    engine = engine_of(GRADS, dtype="float16", **config)
    for optimizer in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        optimizer.grad_scaler._scale.fill_(scale)
    found = {}

    def step():
        for chunk in engine.model:
            for name, parameter in chunk.named_parameters():
                found[name] = parameter.main_grad.detach().clone() / scale
        return True, 0.0, None

    engine.optimizer.step = step
    train(engine, 0)
    return found


def router_gradients():
    """Return by how much the routers' gradients are off from those without a loss scale.

    And the share of these that the auxiliary losses make.
    """
    expected = gradients(1.0, **EXPERTS)
    found, alone = gradients(SCALE, **EXPERTS), gradients(1.0, **{**EXPERTS, "moe_aux_loss_coeff": 0.0})
    routers = [name for name in expected if "router" in name]
    return tuple(
        max(float((some[name] - expected[name]).norm() / expected[name].norm()) for name in routers)
        for some in (found, alone)
    )


def own_hook():
    """A hook that is there already is left alone: return whether it was called, and is there afterwards."""
    engine, called = engine_of(GRADS, dtype="float16"), []
    config = importlib.import_module(ENGINE).get_model_config(engine.model[0])

    def hook(loss):
        called.append(loss)
        return loss

    config.grad_scale_func = hook
    train(engine, 0)
    return bool(called), config.grad_scale_func is hook
