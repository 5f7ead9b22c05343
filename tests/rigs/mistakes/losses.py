"""Mistakes with losses, their scales, and what they are divided by."""

from __future__ import annotations

from unittest import mock

import torch

from megapatch.testing import _data
from rigs.megatron.options import ADAM
from rigs.mistakes import Table, unfinished

FP16 = {"dtype": "fp16", "loss_scale": 2.0**10}

TABLE = Table("losses and their scales")


@TABLE.row("divided by the tokens of the last call", {"tokens-counted": 1}, per_token_loss=True)
def tokens_of_the_last_call(model, step):
    """Calls before the last leave finishing to it, and their tokens are lost."""
    model.zero_grad()
    with unfinished(model):
        model.forward_backward(step, masked=True)
    model.forward_backward(step + 1, masked=True)
    model.optimizer.step()


@TABLE.row("calculate_per_token_loss is set after the model was wrapped", {"tokens-counted": 0})
def by_tokens_too_late(model, step):
    model.config.calculate_per_token_loss = True
    model.train_step(step)


@TABLE.row("a loss function that returns no tokens", {"tokens-counted": 1}, per_token_loss=True)
def no_tokens_returned(model, step):
    model.train_step(step, two_tuple=True)


@TABLE.row("divided by a constant", {}, why="some losses, as that of Dr. GRPO, mean it", per_token_loss=True)
def divided_by_a_constant(model, step):
    """Dr. GRPO: the length of a response is no part of the divisor."""
    finalize = model.config.finalize_model_grads_func
    model.config.finalize_model_grads_func = lambda chunks, tokens, **others: finalize(
        chunks, torch.full_like(tokens, 1000), **others
    )
    model.train_step(step, masked=True)
    model.config.finalize_model_grads_func = finalize


def losses_are(change):
    """Let a trainer's loss function return another loss, made of its loss and its tokens."""

    def loss(*args, **kwargs):
        value, tokens, *others = loss_function(*args, **kwargs)
        return change(value, tokens), tokens, *others

    loss_function = _data.loss_function
    return mock.patch.object(_data, "loss_function", loss)


def losses_times(factor):
    return losses_are(lambda value, tokens: value * factor)


def times(factor):
    """Let the loss of step 1 be multiplied by a factor."""

    def multiplied(model, step):
        model.zero_grad()
        with losses_times(factor if step == 1 else 1.0):
            model.forward_backward(step)
        model.optimizer.step()

    return multiplied


TABLE.row("one loss is NaN", {"tokens-counted": 2})(times(float("nan")))
TABLE.row("one loss is infinite", {"tokens-counted": 2})(times(float("inf")))
TABLE.row(
    "divided by the number of microbatches once more",
    {},
    why="what a loss is meant to be is not to be seen in Megatron's objects",
)(times(0.5))


@TABLE.row(
    "prepare_grads() before step()", {"unscaled-once": 0}, **{**FP16, **ADAM, "use_distributed_optimizer": True}
)
def prepared_twice(model, step):
    """slime before #1842."""
    model.zero_grad()
    model.forward_backward(step)
    model.optimizer.prepare_grads()
    model.optimizer.step()


@TABLE.row("fp16, and the loss is not scaled", {"scaled-once": 0}, **FP16)
def loss_not_scaled(model, step):
    """ROLL, SkyRL."""
    model.config.grad_scale_func = None
    model.train_step(step)


@TABLE.row(
    "fp16, and auxiliary losses are not scaled",
    {"scaled-once": 0},
    **FP16,
    experts=2,
    config={"moe_aux_loss_coeff": 0.1},
)
def only_the_main_loss_scaled(model, step):
    """AReaL: the trainer multiplies its own loss, in its loss function."""
    model.config.grad_scale_func = None
    model.zero_grad()
    model.optimizer.get_loss_scale()
    model.forward_backward(step)
    model.optimizer.step()


@TABLE.row("the loss scale changes before the step", {"scaled-once": 0}, **FP16)
def scale_changed_in_between(model, step):
    model.zero_grad()
    model.forward_backward(step)
    for part in model.optimizer.chained_optimizers:
        part.grad_scaler._scale = part.grad_scaler._scale * 2
    model.optimizer.step()
