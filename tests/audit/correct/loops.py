"""Correct trainers: loops of reinforcement learning, several models in a process, and layouts."""

from __future__ import annotations

import gc

import torch
from rigs.megatron.options import ADAM, BOTH, GRADS
from rigs.mistakes.losses import FP16, losses_are
from rigs.mistakes.schedules import schedule_of
from rigs.mistakes.weights import FP32, SHARDED, copies_of, parameters_of, put, reference_in
from rigs.train_step.models import in_pieces
from torch.distributed.fsdp import fully_shard

from megapatch.testing import mean_loss, tiny_gpt
from megapatch.train_step import TrainStep

from .table import Programs, as_megatron_does, average, backward, made_once, own_backward, seen

LOOPS = Programs()
DROPOUT = {"hidden_dropout": 0.1}


def logged(model, step):
    """Return the mean loss of a forward-only call."""
    with torch.no_grad():
        loss = mean_loss(model.forward_backward(step, forward_only=True))
    seen(model, loss)
    return loss


# ------------------------------------------------------------------------------------------ reinforcement learning
@LOOPS.row("PPO: two epochs of two minibatches")
def ppo(model, step):
    schedule = schedule_of(model)
    old = logged(model, step)
    for minibatch in (0, 1, 1, 0):
        data = model.microbatches(step)[minibatch]
        with losses_are(lambda value, tokens: (value / tokens - old).exp().clamp(0.8, 1.2) * tokens + value):
            backward(model, step, microbatches=[data])
        model.optimizer.step()
    schedule.step(1)


@LOOPS.row("DPO, against a reference that is swapped in", **SHARDED)
@LOOPS.row("DPO, against a reference that is swapped in, in fp32", **FP32)
def dpo(model, step):
    with reference_in(model) as policy:
        reference = logged(model, step)
    put(model, policy)
    with losses_are(lambda value, tokens: -torch.nn.functional.logsigmoid(reference - value / tokens) * tokens):
        model.train_step(step)


@LOOPS.row("the reference follows every other step")
def reference_follows(model, step):
    reference = made_once(model, "reference", lambda: tiny_gpt(layers=4))
    away = logged(reference, step)
    with losses_are(lambda value, tokens: value + 0.1 * (value / tokens - away).square() * tokens):
        model.train_step(step)
    if step % 2:
        put(reference, copies_of(model))


@LOOPS.row("actor, critic and reward model", {}, is_plain=True)
def actor_and_critic(model, step):
    critic, reward = (made_once(model, name, lambda: tiny_gpt(layers=2)) for name in ("critic", "reward"))
    logged(reward, step)
    logged(critic, step)
    critic.train_step(step, seed=1)
    model.train_step(step)


@LOOPS.row("a critic's step between the last call of the actor's and its end", **GRADS, per_token_loss=True)
def critic_in_between(model, step):
    critic = made_once(model, "critic", lambda: tiny_gpt(**FP16))
    with TrainStep(model=model.chunks, optimizer=model.optimizer) as train_step:
        in_pieces(train_step, model, step, (1, 1), {"masked": True})
        critic.train_step(step)
        train_step.finish()


@LOOPS.row("dropout, and log-probabilities without it", config=DROPOUT)
def without_dropout(model, step):
    for chunk in model.chunks:
        chunk.eval()
    logged(model, step)
    for chunk in model.chunks:
        chunk.train()
    model.train_step(step)


@LOOPS.row("weights are sent to an engine, as copies", **BOTH)
def sent_as_copies(model, step):
    model.train_step(step)
    model.gather_parameters()
    for weight in copies_of(model):
        torch.distributed.broadcast(weight, 0)


# ------------------------------------------------------------------------------------------ models
@LOOPS.row("a model is deleted, and built again")
def deleted(model, step):
    model.one = None
    gc.collect()
    model.one = tiny_gpt(layers=2, **BOTH)
    model.one.train_step(step)


LOOPS.row("never trained")(logged)


@LOOPS.row("torch's FSDP2, with its own optimizer and reduces")
def fsdp2(model, step):
    linear = made_once(model, "linear", lambda: fully_shard(torch.nn.Linear(4, 4).cuda()))
    optimizer = made_once(model, "sgd", lambda: torch.optim.SGD(linear.parameters(), lr=0.1))
    linear(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@LOOPS.row(
    "pairs of ranks average weights (gossip)", {"kept-between-steps": 2, "ranks-agree": 2, "reduced-once": 0}
)
def gossip(model, step):
    own_backward(model, step)
    model.optimizer.step()
    average(parameter.data for number, parameter in enumerate(parameters_of(model)) if number % 2 == step % 2)


# ------------------------------------------------------------------------------------------ layouts and options
# The audit watches most layouts in tests/train_step/test_parity.py and in tests/no_harm.
@LOOPS.row("experts", experts=2, config={"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1})
@LOOPS.row("multi-token prediction", config={"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1})
@LOOPS.row(
    "activations are computed again",
    is_plain=True,
    config={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
)
@LOOPS.row(
    "two instances of the distributed optimizer",
    layout={"optimizer_instances": 2},
    is_plain=True,
    **ADAM,
    use_distributed_optimizer=True,
    ddp={"num_distributed_optimizer_instances": 2},
)
def with_options(model, step):
    as_megatron_does(model, step)
