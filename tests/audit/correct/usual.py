"""Correct trainers, of which nothing is found and nothing noted: each does rightly what others do wrongly."""

from __future__ import annotations

import copy
from unittest import mock

import torch
from rigs.megatron.options import ADAM, BOTH
from rigs.mistakes.checkpoints import plan, saved_in_two
from rigs.mistakes.gradients import COUNTING
from rigs.mistakes.losses import FP16, losses_are, losses_times, times
from rigs.mistakes.schedules import new_schedule_of, schedule_of
from rigs.mistakes.weights import SHARDED, log_probabilities, parts_of
from rigs.train_step.models import in_pieces

from megapatch.testing import _data
from megapatch.train_step import TrainStep

from .table import Programs, as_megatron_does

USUAL = Programs()
USUAL.row("as Megatron does", **BOTH)(as_megatron_does)
USUAL.row("one loss is NaN, and the step skipped", **FP16)(times(float("nan")))
USUAL.row("a model is saved in two parts, one parameter as a copy", **SHARDED)(saved_in_two)


@USUAL.row("the schedule is resumed, in bf16", dtype="bf16", **ADAM)
@USUAL.row("the schedule is resumed", **ADAM)
def resumed_schedule(model, step):
    """A new schedule loads what the old one has saved, with the optimizer."""
    schedule = schedule_of(model)
    if step == 1:
        schedule = new_schedule_of(model)
        for part in parts_of(model.optimizer):
            part.load_state_dict(copy.deepcopy(part.state_dict()))
    model.train_step(step)
    schedule.step(1)


@USUAL.row("the schedule advances once for many steps")
def schedule_of_an_iteration(model, step):
    """It advances once for many steps."""
    schedule = schedule_of(model)
    for _ in range(40):
        model.train_step(step, num_microbatches=1)
    schedule.step(1)


@USUAL.row("the schedule advances once for two steps, one of them skipped", **FP16)
def schedule_of_a_rollout(model, step):
    """It advances once for two steps, of which the last overflows."""
    schedule = schedule_of(model)
    model.train_step(step)
    times(float("inf"))(model, 1)
    schedule.step(1)


@USUAL.row("checkpoints are saved, in bf16", **SHARDED)
@USUAL.row("checkpoints are saved", **BOTH)
def saved_in_time(model, step):
    """Parameters, then good copies of them, are saved; an asynchronous save begins at once."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    model.train_step(step)
    model.gather_parameters()
    tree = model.chunks[0].sharded_state_dict()
    with mock.patch.object(AsyncCallsQueue, "_get_async_caller"):
        AsyncCallsQueue().schedule_async_request(plan(tree))
    for leaf in tree.values():
        if isinstance(getattr(leaf, "data", None), torch.Tensor):
            leaf.data = leaf.data.clone()
    plan(tree)


@USUAL.row("routers count the tokens of two calls", **COUNTING)
def in_two_calls(model, step):
    """Routers have counted the tokens of the first call as the second begins; log-probabilities count none."""
    log_probabilities(model, step)
    train_step = TrainStep(model=model.chunks, optimizer=model.optimizer)
    with train_step:
        in_pieces(train_step, model, step, (1, 1), {})
        train_step.finish()


@USUAL.row("routers' counts of an aborted step are forgotten", **COUNTING)
def aborted_and_repeated(model, step):
    train_step = TrainStep(model=model.chunks, optimizer=model.optimizer)
    if step:
        train_step.begin()
        in_pieces(train_step, model, step, (1, 1), {})
        train_step.abort()
    model.train_step(step)


@USUAL.row("the forward step changes the mode", config={"hidden_dropout": 0.1})
def mode_of_the_forward_step(model, step):
    """Megatron-LM's train_rl.py: a forward step changes the mode of the model that it runs."""

    def in_evaluation_mode(data, chunk, **options):
        chunk.eval()
        output = forward_step(data, chunk, **options)
        chunk.train()
        return output

    forward_step = _data.forward_step
    with mock.patch.object(_data, "forward_step", in_evaluation_mode):
        log_probabilities(model, step)
    model.train_step(step)


@USUAL.row("losses are advantages")
def on_policy(model, step):
    """GRPO in groups of two: each loss is an advantage, and ranks differ in their order at most."""
    advantages = [1.0, -1.0, *([2.0, -2.0] if step else [])]
    if step and torch.distributed.get_rank():
        advantages[:2] = -1.0, 1.0
    of_microbatches = iter(advantages)
    with losses_are(lambda value, tokens: value - value.detach() + next(of_microbatches) * tokens):
        model.train_step(step, num_microbatches=len(advantages))


@USUAL.row("a hook reads the loss scale as a property", **FP16)
def loss_hook_reads_the_scale(model, step):
    """The scale is read as a property, which nobody sees."""
    scaler = parts_of(model.optimizer)[0].grad_scaler
    model.config.grad_scale_func = lambda loss: loss * scaler.scale
    model.train_step(step)


@USUAL.row("the loss function reads the loss scale as a property", **FP16)
def loss_function_reads_the_scale(model, step):
    scaler = parts_of(model.optimizer)[0].grad_scaler
    model.config.grad_scale_func = None
    with losses_times(scaler.scale[0] if step else float(scaler.scale)):
        model.train_step(step)
