"""Programs of steps: what is done with gradients, optimizers and schedules of all kinds."""

from __future__ import annotations

import copy
from unittest import mock

import torch
from rigs.megatron.options import linear_schedule, raising_half_way

from megapatch.testing._data import forward_step
from megapatch.testing._tiny_gpt import _models

from .layouts import DENSE, EVERY, FEW, SHARDS
from .table import program
from .trainer import parts_of

WRONG = ("main parameters", "moments", "parameters", "weights", "loss", "gradient norm")


def unfinished(trainer):
    """Return a context in which gradients are left for a later call to finish."""
    return mock.patch.object(trainer.model.config, "finalize_model_grads_func", None)


@program(*EVERY)
def steps(run):
    run.trainer().train(0, 1, 2)


@program("fp32", "bf16", "pp, vpp", "ep", "tp, dropout")
def evaluation_between_steps_and_inside(run):
    _evaluation_between_steps_and_inside(run)


@program("bf16, sharded, overlaps", changed={"megatron.gathered-when-read": WRONG})
def evaluation_inside_a_step_before_a_gather(run):
    _evaluation_between_steps_and_inside(run)


def _evaluation_between_steps_and_inside(run):
    trainer = run.trainer()
    for data in range(3):
        trainer.evaluate(100)
        trainer.model.zero_grad()
        trainer.backward(data)
        trainer.evaluate(101)
        trainer.update()


@program(*DENSE, *SHARDS, "pp, tied", "ep")
def gradients_of_two_batches_accumulated(run):
    trainer = run.trainer()
    for data in range(2):
        trainer.model.zero_grad()
        with unfinished(trainer):
            trainer.backward(2 * data)
        trainer.backward(2 * data + 1)
        trainer.update()


@program("bf16", "fp16, sharded", "bf16, sharded, overlaps", "pp, vpp", "ep")
def early_stopping_leaves_a_batch_out(run):
    trainer = run.trainer()
    trainer.train(0)
    trainer.model.zero_grad()
    trainer.backward(1)
    trainer.train(2)


@program("fp32", "bf16", "bf16, sharded", "tp", "moe")
def sharpness_aware_minimization(run):
    trainer = run.trainer()
    for data in range(2):
        trainer.model.zero_grad()
        trainer.backward(data)
        kept = [parameter.detach().clone() for parameter in trainer.parameters()]
        for parameter in trainer.parameters():
            parameter.data.add_(parameter.main_grad.to(parameter.dtype), alpha=1e-2)
        trainer.model.zero_grad()
        trainer.backward(data)
        for parameter, value in zip(trainer.parameters(), kept, strict=True):
            parameter.data.copy_(value)
        trainer.update()


@program("fp32", "bf16", "fp16")
def local_sgd_averages_weights_every_two_steps(run):
    trainer = run.trainer()
    trainer.model.config.finalize_model_grads_func = None  # no reduce: each rank goes its own way
    for data in range(4):
        trainer.train(data + 10 * run.rank)
        if data % 2:
            for parameter in trainer.parameters():
                torch.distributed.all_reduce(parameter.data)
                parameter.data.div_(2)
            trainer.optimizer.reload_model_params()


@program("fp32", "bf16", "bf16, sharded", "ep")
def gradient_noise_scale(run):
    trainer = run.trainer()
    for data in range(2):
        for microbatches in (1, 4):
            trainer.model.zero_grad()
            trainer.backward(data, num_microbatches=microbatches)
            run.note("noise scale", [float(each.main_grad.norm()) for each in trainer.parameters()])
        trainer.update()


@program("fp32", "bf16", "bf16, sharded", "pp")
def two_optimizers_over_one_model(run):
    from megatron.core.optimizer import get_megatron_optimizer

    trainer = run.trainer()
    config = copy.copy(parts_of(trainer.optimizer)[0].config)
    config.lr = config.min_lr = 0.001
    warm_up = get_megatron_optimizer(config, trainer.model.chunks)
    for data in range(3):
        trainer.model.zero_grad()
        trainer.backward(data)
        if data == 0:
            warm_up.step()
            trainer.optimizer.reload_model_params()
        else:
            trainer.update()


@program("fp32", "bf16", "pp")
def an_optimizer_and_a_schedule_of_their_own(run):
    trainer = run.trainer()
    parameters = trainer.parameters()
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for data in range(3):
        trainer.model.zero_grad()
        trainer.backward(data)
        for parameter in parameters:
            parameter.grad = parameter.main_grad.to(parameter.dtype)
        optimizer.step()
        schedule.step()
    run.note("moments", [optimizer.state[each]["momentum_buffer"] for each in parameters])


class Slots:
    """An optimizer without a __dict__: all that Megatron's schedule needs."""

    __slots__ = ("param_groups",)


@program("fp32", "bf16, sharded")
def a_schedule_of_an_optimizer_with_slots(run):
    trainer = run.trainer()
    slots = Slots()
    slots.param_groups = trainer.optimizer.param_groups
    schedule = linear_schedule(slots, steps=4, max_lr=0.05)
    for data in range(3):
        trainer.train(data)
        schedule.step(1)
    run.note("rates", [group["lr"] for group in slots.param_groups])


@program("bf16", "bf16, sharded", "ep")
def two_schedules_of_one_optimizer(run):
    trainer = run.trainer()
    other = linear_schedule(trainer.optimizer, steps=4, max_lr=0.01)
    for data in range(3):
        trainer.train(data)
        other.step(1)
    state = other.state_dict()
    linear_schedule(trainer.optimizer, steps=4, max_lr=0.01).load_state_dict(state)
    trainer.train(3)


@program("fp32", "bf16", "tp, dropout")
def a_model_without_ddp(run):
    built = run.trainer().model
    (gpt,) = _models(built.config, built.vocab, built.seq, False, True)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=0.01)
    kept = {name: value.clone() for name, value in gpt.state_dict().items() if torch.is_tensor(value)}
    for data in range(3):
        output, loss_of = forward_step(iter(built.microbatches(data, 1)), gpt, two_tuple=True)
        loss, _ = loss_of(output)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if data == 1:
            gpt.load_state_dict(kept, strict=False)
    run.note("weights", [each.detach().clone() for each in gpt.parameters()])


@program("fp32", "bf16", "bf16, sharded, overlaps", "pp")
def a_frozen_layer(run):
    trainer = run.trainer(frozen=("*layers.1.*",))
    trainer.train(0, 1)


@program("bf16", "pp")
def a_frozen_stage(run):
    """The embedding and the first layer, which in a pipeline of two is a stage but for its last norm."""
    run.trainer(frozen=("embedding*", "*layers.0.mlp*", "*layers.0.self_attention*")).train(0, 1)


@program("fp32", "bf16", "bf16, sharded", "moe")
def parameters_that_unfreeze(run):
    trainer = run.trainer()
    frozen = [each for name, each in trainer.model._named_parameters() if "layers.0" in name]
    for parameter in frozen:
        parameter.requires_grad_(False)
    trainer.train(0)
    for parameter in frozen:
        parameter.requires_grad_(True)
    trainer.train(1, 2)


@program("fp16", "fp16, sharded")
def an_overflow(run):
    trainer = run.trainer()
    for data in range(4):
        trainer.model.zero_grad()
        trainer.backward(data)
        if data == 1:
            trainer.model.chunks[0].buffers[0].grad_data[0] = torch.inf
        trainer.update()


@program("fp32", "bf16, sharded", "tp")
def a_backward_pass_that_raises(run):
    trainer = run.trainer(layers=4)
    trainer.train(0)

    def interrupted():
        with raising_half_way(trainer.model, 1):
            trainer.model.zero_grad()
            trainer.backward(1)

    run.raising(interrupted)
    trainer.train(2)


@program("bf16", "bf16, sharded, overlaps", "pp")
def ctrl_c_between_backward_and_step(run):
    trainer = run.trainer()
    trainer.train(0)

    def stopped():
        trainer.model.zero_grad()
        trainer.backward(1)
        raise KeyboardInterrupt

    run.raising(stopped)
    trainer.train(2)


@program(*FEW, "fp16, sharded", "ep")
def three_models_in_turn(run):
    trainers = [run.trainer() for _ in range(3)]
    for data in range(2):
        for trainer in trainers:
            trainer.train(data)


@program("fp16", "fp16, sharded", changed={"megatron.prepare-grads-once": (*WRONG, "collectives", "loss scale")})
def gradients_prepared_to_look_for_an_overflow(run):
    trainer = run.trainer()
    for data in range(3):
        trainer.model.zero_grad()
        trainer.backward(data)
        run.note("overflow", bool(trainer.optimizer.prepare_grads()))
        trainer.update()


@program(
    "bf16, overlapped reduce",
    changed=dict.fromkeys(("megatron.nested-no-sync", "megatron.grad-ready-window"), (*WRONG, "collectives")),
)
def no_sync_around_a_call_of_a_step(run):
    trainer = run.trainer()
    (ddp,) = trainer.model.chunks
    trainer.train(0)
    trainer.model.zero_grad()
    with ddp.no_sync():
        with unfinished(trainer), mock.patch.object(trainer.model.config, "grad_sync_func", None):
            trainer.backward(1)
        torch.distributed.barrier()  # or the next call would race with the reduce that has begun too early
        trainer.backward(2)
    trainer.update()
    trainer.train(3)


@program(
    "bf16, overlapped reduce",
    changed=dict.fromkeys(
        ("megatron.parameters-without-gradients", "megatron.grad-ready-window"), ("raised", "collectives", "loss")
    ),
)
def a_layer_that_gets_no_gradient_in_a_step(run):
    trainer = run.trainer()
    frozen = [each for name, each in trainer.model._named_parameters() if "layers.0.mlp" in name]
    trainer.train(0)
    for parameter in frozen:
        parameter.requires_grad_(False)
    trainer.model.zero_grad()
    run.raising(trainer.backward, 1)


@program("bf16, overlapped reduce", "bf16, sharded, overlaps", "pp, vpp")
def more_microbatches_in_a_later_step(run):
    trainer = run.trainer()
    for data, count in enumerate((2, 4, 2)):
        trainer.model.zero_grad()
        trainer.backward(data, num_microbatches=count)
        trainer.update()
