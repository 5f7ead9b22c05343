"""Correct trainers: what they do with optimizers, schedules, checkpoints and layouts."""

from __future__ import annotations

import copy

import torch
from rigs.megatron.options import ADAM, BOTH, linear_schedule
from rigs.mistakes import other_optimizer
from rigs.mistakes.losses import FP16
from rigs.mistakes.schedules import schedule_of
from rigs.mistakes.weights import BF16, copies_of, moments_of, parts_of, put

from megapatch.testing import init_parallel, tiny_gpt

from .table import Programs, as_megatron_does, backward, gradients_of, groups_of, seen

OPTIMIZERS = Programs()


# ------------------------------------------------------------------------------------------ optimizers
def of_groups(change):
    def changed_and_trained(model, step):
        for group in groups_of(model):
            change(group, step)
        model.train_step(step)

    return changed_and_trained


OPTIMIZERS.row("learning rates fall by hand")(of_groups(lambda group, step: group.update(lr=0.5 / (1 + step))))
OPTIMIZERS.row("the first steps have a learning rate of 0")(
    of_groups(lambda group, step: group.update(lr=0.5 * (step > 0)))
)
OPTIMIZERS.row("weight decay and betas change", **ADAM)(
    of_groups(lambda group, step: group.update(weight_decay=0.1 * step, betas=(0.9 - 0.1 * step, 0.99)))
)


@OPTIMIZERS.row("moments are zeroed on purpose (ReLoRA)", {"kept-between-steps": 3}, **ADAM)
def moments_zeroed(model, step):
    for moment in moments_of(model) if step == 2 else ():
        moment.zero_()
    model.train_step(step)


@OPTIMIZERS.row("a new optimizer in a second phase", **BF16)
def new_optimizer(model, step):
    if step == 2:
        model.optimizer = other_optimizer(model, bf16=True, params_dtype=torch.bfloat16)
        model.set_hooks()
    model.train_step(step)


@OPTIMIZERS.row("moments are moved out, and back to other memory", is_plain=True, **ADAM)
def moments_moved(model, step):
    for moment in moments_of(model) if step else ():
        kept = moment.clone()
        moment.untyped_storage().resize_(0)
        moment.data = kept
    model.train_step(step)


OPTIMIZERS.row("gradients are reduced in bf16", **BF16, ddp={"grad_reduce_in_fp32": False})(as_megatron_does)


CONSTANT = {"dtype": "fp16", "optim": {"loss_scale": 128.0}}
OPTIMIZERS.row("the loss scale is constant", **CONSTANT)(as_megatron_does)


@OPTIMIZERS.row("the loss scale finds its place", dtype="fp16", loss_scale=2.0**40)
def scale_finds_its_place(model, step):
    backward(model, step)
    seen(model, model.optimizer.step()[0])


# ------------------------------------------------------------------------------------------ schedules
@OPTIMIZERS.row("a schedule is over, and another begins (warm restarts)", **ADAM)
def warm_restart(model, step):
    schedule = schedule_of(model)
    if step == 2:
        schedule = model.schedule = linear_schedule(model.optimizer, steps=5, max_lr=0.2)
    model.train_step(step)
    schedule.step(1)


@OPTIMIZERS.row("the schedule advances before the step, and by samples")
def schedule_before(model, step):
    schedule_of(model).step(4)
    model.train_step(step)


@OPTIMIZERS.row("the schedule stays after an overflow", {"gradients-kept": 1}, **FP16)
@OPTIMIZERS.row("parameters are read after an overflow", {"gradients-kept": 1}, **FP16, **BOTH)
def overflowing(model, step):
    """A skipped step leaves nothing to be gathered: the forward pass before it has gathered the last step's."""
    schedule = schedule_of(model)
    backward(model, step)
    if step == 1:
        gradients_of(model)[0][0] = torch.inf
    if model.optimizer.step()[0]:
        schedule.step(1)
    else:
        model.chunks[0].state_dict()


# ------------------------------------------------------------------------------------------ other models
def saved_state(model):
    model.gather_parameters()
    weights = {
        name: value.clone() for name, value in model.chunks[0].state_dict().items() if torch.is_tensor(value)
    }
    return weights, [copy.deepcopy(part.state_dict()) for part in parts_of(model.optimizer)]


def resumed(model, new, state, with_optimizer=True):
    weights, states = state
    new.chunks[0].load_state_dict(weights, strict=False)
    for part, saved in zip(parts_of(new.optimizer), states, strict=True) if with_optimizer else ():
        part.load_state_dict(saved)
    new.optimizer.reload_model_params()


@OPTIMIZERS.row("each step is a run that resumes the last", is_plain=True, **ADAM)
def each_step_a_run(model, step):
    new = tiny_gpt(layers=4, **ADAM)
    if step:
        resumed(model, new, model.saved)
    new.train_step(step)
    model.saved = saved_state(new)
    put(model, copies_of(new))


@OPTIMIZERS.row("another layout loads the weights")
def another_layout(model, step):
    if step < 2:
        model.train_step(step)
        return
    whole = model.parameters()
    init_parallel(tp=2)
    model.sharded = tiny_gpt(layers=4)
    rank = torch.distributed.get_rank()
    for name, parameter in model.sharded._named_parameters():
        is_whole = parameter.shape == whole[name].shape
        parameter.data.copy_(whole[name] if is_whole else whole[name].chunk(2, parameter.partition_dim)[rank])
    model.sharded.train_step(step)
