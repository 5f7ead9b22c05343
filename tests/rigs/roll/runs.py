"""Runs of ROLL's strategy without megapatch's patches and with them, as cells of one run of two ranks."""

import importlib
import importlib.util
import math
import sys
from pathlib import Path

import torch

from megapatch import apply, restore
from megapatch.testing import init_parallel
from rigs.collisions import together
from rigs.log import Log
from rigs.megatron.options import attempt
from rigs.releases import statuses
from rigs.roll.strategy import CHECKOUT, STRATEGY, parameters, strategy_of, train

SCALES = 1.0, 1024.0


def cells(rank, world_size):
    """Yield the cells of `run_cells`: (name, what), first with nothing patched, then with all patches."""
    importlib.import_module(STRATEGY)
    init_parallel()
    restore()
    yield "gradients, without", gradients
    yield "overflow, without", lambda: attempt(overflow)
    yield "overflow, without, unchecked", lambda: attempt(overflow, checked=False)
    yield "bf16, without", lambda: after_steps("bf16")
    yield "unused, without", unused
    apply()
    yield "statuses", statuses
    yield "gradients", gradients
    yield "experts", lambda: gradients(experts=2, moe_aux_loss_coeff=1.0, moe_router_topk=1)
    yield "overflow", overflow
    yield "bf16", lambda: after_steps("bf16")
    yield "NaN in bf16", not_a_number
    yield "unused", unused
    if CHECKOUT:
        yield "together", lambda: together(patch_as_roll, lambda: after_steps("fp32"))


def patch_as_roll():
    """Apply the patches of Megatron and torch in mcore_adapter, as ROLL's strategy and its models do."""
    folder = Path(CHECKOUT, "mcore_adapter/src/mcore_adapter")
    spec = importlib.util.spec_from_file_location("mcore_adapter.patcher", folder / "patcher.py")
    patcher = sys.modules["mcore_adapter.patcher"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(patcher)
    for name, patch in list(vars(patcher).items()):
        if name.startswith("patch_"):
            patch()


def set_scale(strategy, scale):
    for optimizer in getattr(strategy.optimizer, "chained_optimizers", [strategy.optimizer]):
        optimizer.grad_scaler._scale.fill_(scale)


def gradients(**model):
    """Return how far the parameters move in a step of SGD with a loss scale, as a share of that without one."""
    moved = []
    for scale in SCALES:
        strategy = strategy_of(**model)
        set_scale(strategy, scale)
        before = parameters(strategy)
        train(strategy, 0)
        moved.append(torch.cat([(after - before[name]).flatten() for name, after in parameters(strategy).items()]))
    without_scale, with_scale = moved
    return float(with_scale.float().norm() / without_scale.float().norm())


def overflow(checked=True):
    """Train from the default loss scale until two steps were taken.

    Return, by step, the loss scale, the steps of the learning rate, and whether it was skipped; what was logged;
    and the largest difference from a run that begins with the last loss scale.
    """
    log, strategy, found = Log(), strategy_of(), []
    if not checked:
        for chunk in strategy.models_wrapped:
            chunk.ddp_config.check_for_nan_in_grad = False
        set_scale(strategy, 2.0**32)
        strategy.model.config.grad_scale_func = strategy.optimizer.scale_loss
    while strategy.scheduler.steps < 2:
        metrics = train(strategy, strategy.scheduler.steps)
        skipped = math.isinf(metrics["actor/grad_norm"])
        found.append((float(strategy.optimizer.get_loss_scale()), strategy.scheduler.steps, skipped))
    plain = strategy_of()
    set_scale(plain, found[-1][0])
    for step in range(2):
        train(plain, step)
    expected = parameters(plain)
    off = max(float((value - expected[name]).abs().max()) for name, value in parameters(strategy).items())
    return found, log.texts, off


def after_steps(dtype):
    strategy = strategy_of(dtype)
    for step in range(3):
        train(strategy, step)
    return parameters(strategy)


def not_a_number():
    strategy = strategy_of("bf16")
    with torch.no_grad():
        next(strategy.models_wrapped[0].parameters()).fill_(torch.nan)
    return attempt(train, strategy, 0)


def unused():
    """ROLL's own way around parameters without gradients: return the steps that were taken."""
    strategy = strategy_of("fp32")
    layer = strategy.models_wrapped[0].module.decoder.layers[-1]
    layer.mlp.forward = lambda hidden, *args, **kwargs: (torch.zeros_like(hidden), None)
    outcome = [attempt(train, strategy, step)[0] for step in range(3)]
    return outcome, strategy.scheduler.steps
