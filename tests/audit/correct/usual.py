"""Correct trainers, of which nothing is found and nothing noted: each does rightly what others do wrongly."""

from __future__ import annotations

import copy
from unittest import mock

import torch
from rigs.megatron.options import ADAM, BOTH
from rigs.mistakes import Mistake
from rigs.mistakes.checkpoints import plan, saved_in_two
from rigs.mistakes.gradients import COUNTING
from rigs.mistakes.losses import FP16, losses_are, losses_times, times
from rigs.mistakes.schedules import new_schedule_of, schedule_of
from rigs.mistakes.weights import SHARDED, log_probabilities, parts_of
from rigs.train_step.models import in_pieces

from megapatch.testing import _data
from megapatch.train_step import TrainStep

from .table import as_megatron_does


def resumed_schedule(model, step):
    """A new schedule loads what the old one has saved, with the optimizer."""
    schedule = schedule_of(model)
    if step == 1:
        schedule = new_schedule_of(model)
        for part in parts_of(model.optimizer):
            part.load_state_dict(copy.deepcopy(part.state_dict()))
    model.train_step(step)
    schedule.step(1)


def schedule_of_an_iteration(model, step):
    """It advances once for many steps."""
    schedule = schedule_of(model)
    for _ in range(40):
        model.train_step(step, num_microbatches=1)
    schedule.step(1)


def schedule_of_a_rollout(model, step):
    """It advances once for two steps, of which the last overflows."""
    schedule = schedule_of(model)
    model.train_step(step)
    times(float("inf"))(model, 1)
    schedule.step(1)


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


def in_two_calls(model, step):
    """Routers have counted the tokens of the first call as the second begins; log-probabilities count none."""
    log_probabilities(model, step)
    train_step = TrainStep(model=model.chunks, optimizer=model.optimizer)
    with train_step:
        in_pieces(train_step, model, step, (1, 1), {})
        train_step.finish()


def aborted_and_repeated(model, step):
    train_step = TrainStep(model=model.chunks, optimizer=model.optimizer)
    if step:
        train_step.begin()
        in_pieces(train_step, model, step, (1, 1), {})
        train_step.abort()
    model.train_step(step)


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


def on_policy(model, step):
    """GRPO in groups of two: each loss is an advantage, and ranks differ in their order at most."""
    advantages = [1.0, -1.0, *([2.0, -2.0] if step else [])]
    if step and torch.distributed.get_rank():
        advantages[:2] = -1.0, 1.0
    of_microbatches = iter(advantages)
    with losses_are(lambda value, tokens: value - value.detach() + next(of_microbatches) * tokens):
        model.train_step(step, num_microbatches=len(advantages))


def loss_hook_reads_the_scale(model, step):
    """The scale is read as a property, which nobody sees."""
    scaler = parts_of(model.optimizer)[0].grad_scaler
    model.config.grad_scale_func = lambda loss: loss * scaler.scale
    model.train_step(step)


def loss_function_reads_the_scale(model, step):
    scaler = parts_of(model.optimizer)[0].grad_scaler
    model.config.grad_scale_func = None
    with losses_times(scaler.scale[0] if step else float(scaler.scale)):
        model.train_step(step)


def _correct(name, take_step, **options):
    return Mistake(name, "", take_step, {}, {}, options)


USUAL = {
    trainer.name: trainer
    for trainer in (
        _correct("as Megatron does", as_megatron_does, **BOTH),
        _correct("one loss is NaN, and the step skipped", times(float("nan")), **FP16),
        _correct("the schedule is resumed", resumed_schedule, **ADAM),
        _correct("the schedule is resumed, in bf16", resumed_schedule, dtype="bf16", **ADAM),
        _correct("the schedule advances once for many steps", schedule_of_an_iteration),
        _correct("the schedule advances once for two steps, one of them skipped", schedule_of_a_rollout, **FP16),
        _correct("checkpoints are saved", saved_in_time, **BOTH),
        _correct("checkpoints are saved, in bf16", saved_in_time, **SHARDED),
        _correct("a model is saved in two parts, one parameter as a copy", saved_in_two, **SHARDED),
        _correct("routers count the tokens of two calls", in_two_calls, **COUNTING),
        _correct("the forward step changes the mode", mode_of_the_forward_step, config={"hidden_dropout": 0.1}),
        _correct("losses are advantages", on_policy),
        _correct("a hook reads the loss scale as a property", loss_hook_reads_the_scale, **FP16),
        _correct("the loss function reads the loss scale as a property", loss_function_reads_the_scale, **FP16),
        _correct("routers' counts of an aborted step are forgotten", aborted_and_repeated, **COUNTING),
    )
}
