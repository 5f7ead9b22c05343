"""Correct trainers: what they do with weights, optimizers and schedules."""

from __future__ import annotations

import copy
from unittest import mock

import torch
from rigs.megatron.options import ADAM, BOTH, GRADS
from rigs.mistakes.checkpoints import plan
from rigs.mistakes.weights import (
    BF16,
    SHARDED,
    copies_of,
    log_probabilities,
    parameters_of,
    parts_of,
    put,
)

from megapatch.testing import tiny_gpt

from .table import Programs, as_megatron_does, groups_of, made_once, seen

WEIGHTS = Programs()
ALL_BUT_NORMS = ("embedding*", "*linear*", "output*")


def put_for_good(model, weights):
    """Put weights into the model and its main parameters."""
    put(model, weights)
    model.optimizer.reload_model_params()


def mean(weights, others, part=0.5):
    return [weight.lerp(other, part) for weight, other in zip(weights, others, strict=True)]


def in_turn(model, weights, step):
    """Evaluate other weights, and put the model's own back."""
    own = copies_of(model)
    put(model, weights)
    log_probabilities(model, step)
    put(model, own)


# ------------------------------------------------------------------------------------------ averages of weights
@WEIGHTS.row("an average of weights is evaluated in the model", is_plain=True)
@WEIGHTS.row("an average of weights is evaluated in the model, sharded", **SHARDED)
def average_evaluated(model, step):
    model.train_step(step)
    model.average = mean(made_once(model, "average", lambda: copies_of(model)), copies_of(model))
    in_turn(model, model.average, step)


@WEIGHTS.row("an average of weights is kept in a model of its own", is_plain=True)
def average_in_another_model(model, step):
    """Mean teacher: it is never stepped."""
    teacher = made_once(model, "teacher", lambda: tiny_gpt(layers=4))
    log_probabilities(teacher, step)
    model.train_step(step)
    put(teacher, mean(copies_of(teacher), copies_of(model)))


@WEIGHTS.row("training continues from an average (LAWA)", **BF16)
def continued_from_an_average(model, step):
    kept = made_once(model, "kept", lambda: copies_of(model))
    model.train_step(step)
    if step == 1:
        put_for_good(model, mean(kept, copies_of(model)))


@WEIGHTS.row("Lookahead", {"kept-between-steps": 3})
@WEIGHTS.row("Lookahead, sharded", **SHARDED)
def lookahead(model, step):
    slow = made_once(model, "slow", lambda: copies_of(model))
    model.train_step(step)
    if step % 2:
        model.slow = mean(slow, copies_of(model))
        put_for_good(model, model.slow)


# ------------------------------------------------------------------------------------------ other weights
@WEIGHTS.row("a learning rate is looked for, from the same weights", {"kept-between-steps": 2})
def learning_rate_looked_for(model, step):
    first = made_once(model, "first", lambda: copies_of(model))
    put(model, first)
    for group in groups_of(model):
        group["lr"] = 0.1 * 2**step
    seen(model, model.train_step(step).loss)


@WEIGHTS.row("back to the best", **BF16, **ADAM)
def back_to_the_best(model, step):
    """The second step is undone, weights and optimizer."""
    if step == 2:
        put(model, model.best[0])
        for part, state in zip(parts_of(model.optimizer), model.best[1], strict=True):
            part.load_state_dict(state)
        model.optimizer.reload_model_params()
    model.train_step(step)
    if step == 0:
        states = [copy.deepcopy(part.state_dict()) for part in parts_of(model.optimizer)]
        model.best = copies_of(model), states


@WEIGHTS.row("steps are undone, and weights read at once", **BOTH)
@WEIGHTS.row("steps are undone, and weights read at once, in bf16", **BF16)
@WEIGHTS.row("steps are undone, and weights read at once, in fp32", **ADAM)
def gone_back(model, step):
    """Nothing is gathered between."""
    (ddp,) = model.chunks
    model.train_step(step)
    if step == 0:
        model.gather_parameters()
        model.saved = copy.deepcopy(dict(ddp.state_dict()))
        return
    ddp.load_state_dict(model.saved)
    model.optimizer.reload_model_params()
    ddp.state_dict()


# ------------------------------------------------------------------------------------------ written for good
@WEIGHTS.row("pruned weights are zeroed after each step", **BF16)
def pruned(model, step):
    masks = made_once(model, "masks", lambda: [weight.abs() > 0.1 for weight in copies_of(model)])
    model.train_step(step)
    put(model, [weight * mask for weight, mask in zip(copies_of(model), masks, strict=True)])
    by_id = {id(parameter): mask for parameter, mask in zip(parameters_of(model), masks, strict=True)}
    for part in parts_of(model.optimizer):
        for models, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(models, mains, strict=True):
                main.data.mul_(by_id[id(parameter)])


# ------------------------------------------------------------------------------------------ what is trained
WEIGHTS.row("a layer is frozen", frozen=("*layers.1.*",), **BOTH)(as_megatron_does)
WEIGHTS.row("norms alone are trained", frozen=ALL_BUT_NORMS, **GRADS)(as_megatron_does)
WEIGHTS.row("norms alone are trained, in two stages", frozen=ALL_BUT_NORMS, layout={"pp": 2})(as_megatron_does)


def changed_before_it_is_wrapped(change):
    """Return a new model, of which `change` was given the GPTModel."""
    from megapatch.testing import _tiny_gpt

    def models(*args):
        made = make(*args)
        change(made[0])
        return made

    make = _tiny_gpt._models
    with mock.patch.object(_tiny_gpt, "_models", models):
        return tiny_gpt(layers=4)


def with_adapter(gpt):
    """Freeze all, and add a matrix of low rank to the head's weight."""
    gpt.requires_grad_(False)
    head = gpt.output_layer
    head.down = torch.nn.Parameter(torch.full((2, 16), 0.1))
    head.up = torch.nn.Parameter(torch.zeros(32, 2))
    head.scale, forward = 1.0, head.forward
    head.forward = lambda inputs, weight=None, **options: forward(
        inputs, weight=head.weight + head.scale * head.up @ head.down, **options
    )


@WEIGHTS.row("LoRA, whose reference is the model without it")
def lora(model, step):
    model.adapted = made_once(model, "adapted", lambda: changed_before_it_is_wrapped(with_adapter))
    head = model.adapted.chunks[0].module.output_layer
    head.scale = 0.0
    log_probabilities(model.adapted, step)
    head.scale = 1.0
    model.adapted.train_step(step)


@WEIGHTS.row("LoRA, and the adapter is saved by itself")
def adapter_saved(model, step):
    adapted = made_once(model, "adapted", lambda: changed_before_it_is_wrapped(with_adapter))
    adapted.train_step(step)
    from megatron.core.dist_checkpointing import ShardedTensor

    head = adapted.chunks[0].module.output_layer
    plan({name: ShardedTensor.from_rank_offsets(name, getattr(head, name)) for name in ("up", "down")})
