"""Correct trainers: loops of reinforcement learning, several models in a process, and layouts."""

from __future__ import annotations

import gc

import torch
from rigs.megatron.options import ADAM, BOTH, GRADS
from rigs.mistakes.losses import losses_are
from rigs.mistakes.schedules import schedule_of
from rigs.mistakes.weights import SHARDED, copies_of, parameters_of, put, reference_in
from rigs.train_step.models import allow_sequence_parallel

from megapatch.testing import mean_loss, tiny_gpt

from .table import Programs, average, backward, made_once, own_backward, seen

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
@LOOPS.row("a student learns from a teacher")
def distilled(model, step):
    teacher = made_once(model, "teacher", lambda: tiny_gpt(layers=2))
    aim = logged(teacher, step)
    with losses_are(lambda value, tokens: (value / tokens - aim).abs() * tokens):
        model.train_step(step)


@LOOPS.row("a GAN: two steps of one, and one of the other", is_plain=True)
def gan(model, step):
    critic = made_once(model, "critic", lambda: tiny_gpt(layers=2, **ADAM))
    for part in range(2):
        critic.train_step(2 * step + part, seed=1)
    logged(critic, step)
    model.train_step(step)


@LOOPS.row("a sweep: one model after another")
def sweep(model, step):
    one = tiny_gpt(layers=2, lr=0.1 * (1 + step))
    seen(model, [one.train_step(data).loss for data in range(2)])


@LOOPS.row("a model is deleted, and built again")
def deleted(model, step):
    model.one = None
    gc.collect()
    model.one = tiny_gpt(layers=2, **BOTH)
    model.one.train_step(step)


@LOOPS.row("evaluated before it is trained", is_plain=True)
def evaluated_first(model, step):
    if step == 0:
        logged(model, 9)
    model.train_step(step)


LOOPS.row("never trained")(logged)


@LOOPS.row(
    "pairs of ranks average weights (gossip)", {"kept-between-steps": 2, "ranks-agree": 2, "reduced-once": 0}
)
def gossip(model, step):
    own_backward(model, step)
    model.optimizer.step()
    average(parameter.data for number, parameter in enumerate(parameters_of(model)) if number % 2 == step % 2)


# ------------------------------------------------------------------------------------------ layouts and options
@LOOPS.row("sequence parallel", layout={"tp": 2})
def sequence_parallel(model, step):
    allow_sequence_parallel()
    made_once(model, "sharded", lambda: tiny_gpt(layers=2, config={"sequence_parallel": True})).train_step(step)


def options(name, layout=None, data=2, is_plain=False, **options):
    """Add a trainer that does as Megatron does, on the data of two data-parallel ranks."""
    LOOPS.row(name, layout=layout, is_plain=is_plain, **options)(
        lambda model, step: model.train_step(step, num_microbatches=data)
    )


options("two stages", {"pp": 2}, 4, True)
options("two stages of two, overlapped", {"pp": 2, "vpp": 2}, 4, True, **BOTH)
options("two stages with tied embeddings", {"pp": 2}, 4, tied_embeddings=True)
options("tensor parallel", {"tp": 2}, 4, True)
options("tensor parallel, with dropout", {"tp": 2}, config=DROPOUT)
options("context parallel", {"cp": 2}, attention=False)
options("experts", experts=2, config={"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1})
options("experts on two ranks", {"ep": 2}, experts=4, **GRADS)
options("multi-token prediction", config={"mtp_num_layers": 1})
options(
    "activations are computed again",
    is_plain=True,
    config={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
)
options("distributed optimizer with overlaps", is_plain=True, **BOTH)
options(
    "two instances of the distributed optimizer",
    {"optimizer_instances": 2},
    is_plain=True,
    **ADAM,
    use_distributed_optimizer=True,
    ddp={"num_distributed_optimizer_instances": 2},
)
