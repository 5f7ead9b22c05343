"""Correct trainers that bend one rule each: the strongest that are known near rules whose breach is a finding."""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from unittest import mock

import torch
from rigs.megatron.grad_ready import BUFFER
from rigs.megatron.options import ADAM, BOTH, GRADS
from rigs.mistakes import other_optimizer
from rigs.mistakes.checkpoints import and_loses_moments, optimizer_loads, without_moments
from rigs.mistakes.losses import FP16, losses_are, losses_times
from rigs.mistakes.weights import copies_of, parameters_of, parts_of, put

from megapatch.testing import _data, tiny_gpt

from .batches import changed, in_halves, loop_of_its_own
from .on_purpose import used_twice_with_decay
from .table import Programs, backward, gradients_of, made_once

REDUCES_AGAIN = "grad_reduce_finished" in BUFFER.read_text()
"""Whether gradients may be reduced again that were not zeroed since; up to 0.16 an assertion forbids it."""
BENDING = Programs()
SHARDED = {**ADAM, "use_distributed_optimizer": True}
TOKENS = {"per_token_loss": True}


def bends(name, take_step, notes=None, **options):
    """Add a trainer that is correct, and these notes of it."""
    BENDING.row(name, notes, **options)(take_step)


# ------------------------------------------------------------------------------------------ reduced-once
def penalize(model):
    """Add the gradient of a penalty, which is the same on all ranks."""
    with model.chunks[0].no_sync():
        (0.01 * sum(parameter.square().sum() for parameter in parameters_of(model))).backward()


def penalized(model, step):
    backward(model, step)
    penalize(model)
    model.optimizer.step()


def penalized_as_finished(model, step):
    changed(lambda model, *_: penalize(model))(model, step)


def finished_in_each_call(model, step):
    """The reduce is that of an average, which stays what it is."""
    in_halves(model, step, unfinished_calls=())
    model.optimizer.step()


PENALIZED = {"reduced-once": 0, "gradients-kept": 0}
bends("a penalty after the reduce", penalized, PENALIZED)
bends("a penalty after the reduce, overlapped", penalized, PENALIZED, **GRADS)
bends("a penalty in the hook that finishes", penalized_as_finished, PENALIZED)
bends("an average is reduced in each call", finished_in_each_call, {"reduced-once": 0}, is_plain=True)


# ------------------------------------------------------------------------------------------ fresh-gradients
def with_another_players(model, step, calls=1):
    """A GAN that is unrolled: the other player's loss leaves gradients here, which are zeroed before the step."""
    for call in range(calls):
        model.forward_backward(10 + step + call)
    model.train_step(step)


def decaying(model, step):
    """Momentum in the buffers: gradients decay instead of being zeroed."""
    torch._foreach_mul_(gradients_of(model), 0.9)
    model.optimizer.zero_grad()  # in fp32 they are `grad` of each parameter since the last step
    model.forward_backward(step)
    model.optimizer.step()


DROPPED = {"gradients-dropped": 0}
bends("another player's gradients are zeroed", with_another_players, DROPPED, is_plain=True)
if REDUCES_AGAIN:  # before 0.18 an assertion ends it
    bends(
        "another player's gradients are zeroed, overlapped", with_another_players, DROPPED, is_plain=True, **BOTH
    )
bends(
    "another player's gradients are zeroed, of two calls",
    partial(with_another_players, calls=2),
    {**DROPPED, "reduced-once": 0},
)
bends("gradients decay in the buffers", decaying)


# ------------------------------------------------------------------------------------------ steps
def on_zeros(model, step):
    """A bad batch costs a step on zeros, which all ranks make, and which counts."""
    backward(model, step)
    if step == 1:
        model.zero_grad()
    model.optimizer.step()


def made_by_two(model, step):
    """Two optimizers step on the same gradients."""
    made_once(model, "other", lambda: other_optimizer(model))
    model.train_step(step)
    model.other.step()


def with_state_made_before(model, step):
    if step == 0:
        model.optimizer.step()
    model.train_step(step)


bends("a bad batch is a step on zeros", on_zeros, {"gradients-used": 1})
bends("two optimizers step on the same gradients", made_by_two, {"kept-between-steps": 3})
bends("the optimizer's state is made by a step on nothing", with_state_made_before, **ADAM)
bends("two steps before the gather", used_twice_with_decay, **BOTH)


# ------------------------------------------------------------------------------------------ scales
def tokens_times_the_scale(model, step):
    """The loss of each token is multiplied by the scale, which is read as a property."""
    scaler = parts_of(model.optimizer)[0].grad_scaler
    model.config.grad_scale_func = None

    def scaled(mask, output, *args, **kwargs):
        return loss_function(mask, output * scaler.scale, *args, **kwargs)

    loss_function = _data.loss_function
    with mock.patch.object(_data, "loss_function", scaled):
        model.train_step(step)


def divided_and_multiplied(model, step):
    backward(model, step)
    model.optimizer.prepare_grads()
    torch._foreach_mul_(gradients_of(model), float(parts_of(model.optimizer)[0].grad_scaler.scale))
    model.optimizer.step()


bends("tokens are multiplied by the loss scale", tokens_times_the_scale, **FP16)
bends("gradients are divided, read and multiplied", divided_and_multiplied, **{**FP16, **SHARDED})


# ------------------------------------------------------------------------------------------ gathered-when-read
def gathered_by_hand(model, step):
    model.train_step(step)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for buffer in model.chunks[0].buffers:
        for bucket in buffer.buckets:
            shards = bucket.param_data.view(size, -1)
            torch.distributed.all_gather_into_tensor(bucket.param_data, shards[rank].clone())


def gathered_in_place(model, step):
    model.train_step(step)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for buffer in model.chunks[0].buffers:
        for bucket in buffer.buckets:
            shards = list(bucket.param_data.view(size, -1))
            torch.distributed.all_gather(shards, shards[rank])
    copy.deepcopy(model.chunks[0].state_dict())


bends("gathered by hand", gathered_by_hand, **BOTH)
bends("gathered by hand, in place, and copied", gathered_in_place, **BOTH)


# ------------------------------------------------------------------------------------------ tokens-counted
def dropped_if_nan(model, step):
    with losses_times(float("nan") if step == 1 else 1.0):
        backward(model, step)
    if step == 1:
        model.zero_grad()
    else:
        model.optimizer.step()


def zeros_for_nan(model, step):
    with losses_times(float("nan") if step == 1 else 1.0):
        changed(lambda model, gradients, _: [each.nan_to_num_(0.0) for each in gradients])(model, step)


def plus_infinity(model, step):
    """Only what is logged is infinite."""
    with losses_are(lambda value, tokens: value + float("inf")):
        model.train_step(step)


def divided_by_the_calls(model, step):
    """The calls of a step have as many tokens: half of each loss is divided by those of the last."""
    in_halves(model, step)
    model.optimizer.step()


def by_tokens_later(model, step):
    """calculate_per_token_loss is set once the model is wrapped, and a hook puts the factor right."""
    model.config.calculate_per_token_loss = True
    size = torch.distributed.get_world_size()
    changed(lambda model, gradients, _: torch._foreach_mul_(gradients, size))(model, step)


def penalty_without_tokens(model, step):
    masks = mock.patch.object(_data, "loss_mask", lambda labels, _: torch.zeros(labels.shape))
    with masks if step == 1 else contextlib.nullcontext(), losses_are(lambda value, tokens: value + 1.0):
        model.train_step(step)


bends("a batch whose loss is NaN is dropped", dropped_if_nan, {"gradients-dropped": 1})
bends("a batch whose loss is NaN is dropped, sharded", dropped_if_nan, {"gradients-dropped": 1}, **SHARDED)
bends("gradients that are NaN become zeros", zeros_for_nan, {"gradients-kept": 0})
bends("the loss that is logged is infinite", plus_infinity)
bends("losses are divided by the number of calls", divided_by_the_calls, {"tokens-counted": 1}, **TOKENS)
bends("a factor for tokens is put right", by_tokens_later, {"tokens-counted": 0, "gradients-kept": 0})
bends("a penalty without tokens", penalty_without_tokens, {"tokens-counted": 2}, **TOKENS)


# ------------------------------------------------------------------------------------------ every-chunk-steps
def critic_of(model):
    return made_once(model, "critic", lambda: tiny_gpt(layers=4))


def trained_by_itself(model, step):
    loop_of_its_own(critic_of(model), step)


def written_by_hand(model, step):
    critic = critic_of(model)
    for grads in gradients_of(critic):
        grads.fill_(1e-3)
    critic.optimizer.step()


def stepped_on_zeros(model, step):
    critic_of(model).optimizer.step()


def actor_around(critic):
    """The two calls of the actor's step are made around a step of a critic."""

    def step_of_both(model, step):
        in_halves(model, step, between=lambda: critic(model, step))
        model.optimizer.step()

    return step_of_both


bends("a critic is trained by its own loop between two calls", actor_around(trained_by_itself))
bends("a critic's gradients are written between two calls", actor_around(written_by_hand))
bends("a critic is stepped on nothing between two calls", actor_around(stepped_on_zeros))


# ------------------------------------------------------------------------------------------ hooks-balanced
def forward_does(change):
    """Change the model's config in the forward step, and leave it so."""

    def changed_in_the_forward_step(model, step):
        def forward(*args, **kwargs):
            change(model, step)
            return forward_step(*args, **kwargs)

        forward_step = _data.forward_step
        with mock.patch.object(_data, "forward_step", forward):
            model.train_step(step)

    return changed_in_the_forward_step


def hook_is_set(model, step):
    model.config.param_sync_func = model.config.param_sync_func or (lambda *_: None)


def hook_is_another(model, step):
    model.config.finalize_model_grads_func = partial(model.config.finalize_model_grads_func)


def in_no_sync(model, step):
    """The schedule's own no_sync() ends before the last microbatch."""
    model.zero_grad()
    with model.chunks[0].no_sync():
        model.forward_backward(step)
    model.optimizer.step()


def timed_over_calls(model, step):
    from megatron.core.timers import Timers

    timers = model.config.timers = made_once(model, "timers", lambda: Timers(2, "minmax"))
    forward_does(lambda *_: timers("rollout")._started or timers("rollout").start())(model, step)


bends("a hook that was None is set in a call", forward_does(hook_is_set))
bends("a hook is another in each call", forward_does(hook_is_another), {"hooks-balanced": 0})
bends("no_sync() around a whole call", in_no_sync, {"hooks-balanced": 0}, **GRADS)
bends("a trainer's timer runs over calls", timed_over_calls, {"hooks-balanced": 0})


# ------------------------------------------------------------------------------------------ ranks, loads
def each_at_its_own_place(model, step):
    """Each rank differentiates near the weights, at a place of its own, and goes back."""
    kept, generator = copies_of(model), torch.Generator().manual_seed(torch.distributed.get_rank())
    put(model, [weight + 1e-3 * torch.randn(weight.shape, generator=generator) for weight in kept])
    backward(model, step)
    put(model, kept)
    model.optimizer.step()


def counted_anew(optimizer, saved):
    optimizer.load_state_dict(saved)
    for state in optimizer.optimizer.state.values():
        state["step"] = torch.tensor(0.0)


bends("each rank differentiates at its own place", each_at_its_own_place)
bends("moments are left out of what is loaded", optimizer_loads(without_moments), {"loaded-is-there": 1}, **ADAM)
bends("moments are reset after a load", optimizer_loads(and_loses_moments), {"kept-between-steps": 1}, **ADAM)
bends("steps are counted anew after a load", optimizer_loads(counted_anew), {"loaded-is-there": 1}, **ADAM)
