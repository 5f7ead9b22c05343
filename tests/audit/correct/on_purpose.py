"""Correct trainers that do on purpose what others do by mistake: there is no finding, and these notes."""

from __future__ import annotations

import copy

import torch
from rigs.megatron.options import ADAM, BOTH
from rigs.mistakes import other_optimizer
from rigs.mistakes.checkpoints import plan
from rigs.mistakes.losses import FP16, losses_times
from rigs.mistakes.schedules import new_schedule_of, schedule_of
from rigs.mistakes.weights import BF16, SHARDED, copies_of, log_probabilities, parameters_of, parts_of, put

from .table import Programs, average, backward, gradients_of, own_backward

CHUNKS = {"pp": 2, "vpp": 2}
ON_PURPOSE = Programs()


# ------------------------------------------------------------------------------------------ gradients
@ON_PURPOSE.row("a GAN that is unrolled", {"gradients-dropped": 0, "kept-between-steps": 3})
def unrolled(model, step):
    """A GAN: gradients of the other player's loss are zeroed, and each of two optimizers steps on its own."""
    model.other = getattr(model, "other", None) or other_optimizer(model)
    own_backward(model, 10 + step)
    backward(model, step)
    (model.other if step % 2 else model.optimizer).step()


@ON_PURPOSE.row("m-SAM")
def sharpness_aware_by_microbatch(model, step):
    """m-SAM: each microbatch at its own place nearby; the sum is written into the buffers by hand."""
    kept, total = copies_of(model), [torch.zeros_like(grads) for grads in gradients_of(model)]
    for part in range(2):
        own_backward(model, 2 * step + part, num_microbatches=1)
        for parameter in parameters_of(model):
            parameter.data.add_(parameter.main_grad.to(parameter.dtype), alpha=1e-3)
        own_backward(model, 2 * step + part, num_microbatches=1)
        torch._foreach_add_(total, gradients_of(model))
        put(model, kept)
    model.zero_grad()
    average(total)
    torch._foreach_copy_(gradients_of(model), total)
    model.optimizer.step()


@ON_PURPOSE.row("a gradient noise scale", {"gradients-dropped": 0})
def noise_scale(model, step):
    """The gradients of one rank's small batch are measured, and zeroed; the whole batch is trained on."""
    own_backward(model, step, num_microbatches=1)
    sum(float(grads.square().sum()) for grads in gradients_of(model))
    model.train_step(step)


@ON_PURPOSE.row("gradients are reduced by hand, in bf16", {"reduced-once": 0}, **BF16)
@ON_PURPOSE.row("gradients are reduced by hand", {"reduced-once": 0})
def reduced_by_hand(model, step):
    own_backward(model, step)
    average(gradients_of(model))
    model.optimizer.step()


@ON_PURPOSE.row("an evolution strategy")
def evolution_strategy(model, step):
    """There is no backward pass: gradients are estimated, and written by hand."""
    if step == 0:
        model.train_step(step)
        return
    for grads in gradients_of(model):
        grads.fill_(1e-3 * step)
    model.optimizer.step()


@ON_PURPOSE.row("gradients are used twice, with decay")
def used_twice_with_decay(model, step):
    model.train_step(step)
    torch._foreach_mul_(gradients_of(model), 0.5)
    model.optimizer.step()


# ------------------------------------------------------------------------------------------ ranks
@ON_PURPOSE.row("local SGD", {"kept-between-steps": 3, "ranks-agree": 2, "reduced-once": 0})
def local_sgd(model, step):
    """Each rank goes its own way, and now and then ranks average their weights."""
    own_backward(model, step)
    model.optimizer.step()
    if step == 1:
        average(parameter.data for parameter in parameters_of(model))


@ON_PURPOSE.row("DiLoCo", {"kept-between-steps": 3, "ranks-agree": 2, "reduced-once": 0})
def diloco(model, step):
    """An outer optimizer, with momentum, steps on what ranks have moved by."""
    outer = getattr(model, "outer", None) or copies_of(model)
    own_backward(model, step)
    model.optimizer.step()
    if step == 1:
        moved = [now - before for now, before in zip(copies_of(model), outer, strict=True)]
        average(moved)
        put(model, [before + 0.7 * by for before, by in zip(outer, moved, strict=True)])
    model.outer = outer


@ON_PURPOSE.row("a prompt of each rank's own", {"ranks-agree": 1})
def prompt_of_its_own(model, step):
    """An embedding of each rank's own data, made by each rank."""
    if step == 0:
        parameter = next(iter(parameters_of(model)))
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    model.train_step(step)


@ON_PURPOSE.row("a prompt outside of buckets", {"ranks-agree": 2})
def prompt_outside_of_buckets(model, step):
    """The same, with an optimizer of its own."""
    if step == 0:
        model.chunks[0].module.prompt = torch.nn.Parameter(torch.zeros(4))
    model.train_step(step)
    model.chunks[0].module.prompt.data.add_(torch.distributed.get_rank())


# ------------------------------------------------------------------------------------------ weights
@ON_PURPOSE.row("parameters are shrunk twice", {"main-params-agree": 2}, **BF16)
def shrunk_twice(model, step):
    """Weights and main parameters decay by hand; rounding makes their last bits differ."""
    if step:
        torch._foreach_mul_([parameter.data for parameter in parameters_of(model)], 0.999)
        for part in parts_of(model.optimizer):
            for group in part.optimizer.param_groups:
                torch._foreach_mul_([main.data for main in group["params"]], 0.999)
    model.train_step(step)


@ON_PURPOSE.row("trained on quantized weights, sharded", {"main-params-agree": 2}, **SHARDED)
@ON_PURPOSE.row("trained on quantized weights", {"main-params-agree": 2}, **BF16)
def quantized(model, step):
    """Each forward pass runs on 8 bits, and the optimizer steps the full precision."""
    if step:
        put(model, [(weight * 64).round() / 64 for weight in copies_of(model)])
    model.train_step(step)


@ON_PURPOSE.row("an older policy is evaluated before the step", {"main-params-agree": 1}, **BF16)
def lent_until_the_step(model, step):
    """An older policy is evaluated before the step, which writes the policy's weights over it."""
    backward(model, step)
    put(model, [weight * 0.5 for weight in copies_of(model)])
    log_probabilities(model, step)
    model.optimizer.step()


@ON_PURPOSE.row("the optimizer alone is loaded", {"main-params-agree": 3}, **BF16, **ADAM)
def the_optimizer_alone_is_loaded(model, step):
    if step == 2:
        for part, saved in zip(parts_of(model.optimizer), model.saved, strict=True):
            part.load_state_dict(saved)
    if step == 1:
        model.saved = [copy.deepcopy(part.state_dict()) for part in parts_of(model.optimizer)]
    model.train_step(step)


@ON_PURPOSE.row("chunks take turns", {"every-chunk-steps": 1, "gradients-dropped": 1}, layout=CHUNKS)
def chunks_take_turns(model, step):
    """Block coordinate descent."""
    model.each = getattr(model, "each", None) or [other_optimizer(model, [chunk]) for chunk in model.chunks]
    backward(model, step)
    model.each[step % 2].step()


# ------------------------------------------------------------------------------------------ schedules, checkpoints
@ON_PURPOSE.row("a schedule is rewound after a load", {"loaded-is-there": 2}, **ADAM)
def rewound(model, step):
    """A schedule is loaded, and warms up again."""
    schedule = schedule_of(model)
    if step == 2:
        schedule = new_schedule_of(model)
        schedule.num_steps = 0
        schedule.step(0)
    model.train_step(step)
    schedule.step(1)


@ON_PURPOSE.row("a schedule by tokens", {"learning-rate-moves": 2}, **FP16)
def schedule_of_tokens(model, step):
    """It advances by what was seen, and an overflow has seen it, too."""
    schedule = schedule_of(model)
    with losses_times(float("inf") if step == 1 else 1.0):
        backward(model, step)
    model.optimizer.step()
    schedule.step(2 + step)


@ON_PURPOSE.row("a head is saved by itself", {"saved-what-is": 1})
def head_saved_by_itself(model, step):
    model.train_step(step)
    model.gather_parameters()
    tree = model.chunks[0].sharded_state_dict()
    plan({name: leaf for name, leaf in tree.items() if name.endswith("output_layer.weight")})


@ON_PURPOSE.row("names are read after a step", {"gathered-when-read": 1}, **BOTH)
def names_read(model, step):
    model.train_step(step)
    list(model.chunks[0].state_dict())


@ON_PURPOSE.row("a save is planned before the gather", {"gathered-when-read": 1}, **BOTH)
def planned_before_the_gather(model, step):
    model.train_step(step)
    tree = model.chunks[0].sharded_state_dict()
    model.gather_parameters()
    plan(tree)
