"""Programs of what people do by hand, and with classes of their own, around one normal call of Megatron's."""

from __future__ import annotations

import copy
import importlib
import pickle
from unittest import mock

import torch

from megapatch._mcore.bucket_groups import bucket_groups
from megapatch.testing._data import forward_step

from .table import program
from .trainer import parts_of

OVERLAPPED = ("bf16, overlapped reduce", "fp32, sharded, overlaps")


def with_adam(run, kind):
    """Build a model whose inner optimizer is of this class."""
    with mock.patch.object(torch.optim, "AdamW", kind):
        trainer = run.trainer()
    assert all(type(part.optimizer) is kind for part in parts_of(trainer.optimizer))
    return trainer


def backward(trainer, data, loss_of_own=lambda: 0.0):
    """Run one microbatch forward and backward, without a schedule."""
    (chunk,) = trainer.model.chunks
    output, loss_function = forward_step(iter(trainer.model.microbatches(data, 1)), chunk, two_tuple=True)
    loss, _ = loss_function(output)
    trainer.run.note("loss", loss.detach())
    (loss + loss_of_own()).backward()


# ------------------------------------------------------------------------------------ optimizers of one's own
class Listing(torch.optim.AdamW):
    """Lists its parameters when state is loaded, which Megatron does once its shards are in the groups."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.listed = [group["params"][:] for group in self.param_groups]

    def step(self, closure=None):
        given = [group["params"] for group in self.param_groups]
        for group, listed in zip(self.param_groups, self.listed, strict=True):
            group["params"] = listed
        result = super().step(closure)
        for group, parameters in zip(self.param_groups, given, strict=True):
            group["params"] = parameters
        return result


@program("fp32, sharded", "bf16, sharded", "fp32, sharded, overlaps")
def an_optimizer_that_lists_its_parameters_when_state_is_loaded(run):
    with_adam(run, Listing).train(0, 1)


@program("fp32, sharded", "bf16, sharded", "bf16")
def a_norm_of_what_the_optimizer_trains(run):
    trainer = run.trainer()
    trained = [
        each for part in parts_of(trainer.optimizer) for group in part.param_groups for each in group["params"]
    ]
    run.note("trained", [(each.requires_grad, each.is_leaf, list(vars(each))) for each in trained])
    trainer.train(0)


class OneCount(torch.optim.AdamW):
    """Has one step count for all parameters."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update({name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")})
                    state["step"] = self.count = getattr(self, "count", torch.zeros(()))
        self.count = next(iter(self.state.values()))["step"]
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                rate = group["lr"] / self.state[parameter]["step"].item()
                parameter.data.add_(parameter.grad, alpha=-rate)


@program("fp32, sharded", "bf16, sharded")
def a_save_of_an_optimizer_with_one_count_for_all(run):
    trainer = with_adam(run, OneCount)
    for data in range(3):
        trainer.train(data)
        trainer.disk.tree(loading=False)


@program("fp16, sharded", "bf16, sharded", "pp, vpp")
def a_load_of_an_optimizer_with_one_count_for_all(run):
    trainer = with_adam(run, OneCount)
    trainer.train(0, 1)
    saved = trainer.optimizer_state()
    trainer.train(2)
    trainer.optimizer.load_state_dict(copy.deepcopy(saved[0][0]))
    trainer.train(3, 4)


class Whole(torch.optim.AdamW):
    """Is pickled and copied with all that it has, hooks of users too."""

    def __getstate__(self):
        return self.__dict__


@program("bf16", "fp16", "bf16, sharded", "fp32")
def an_optimizer_that_is_pickled_whole(run):
    trainer = with_adam(run, Whole)
    trainer.train(0)
    for part in parts_of(trainer.optimizer):
        run.note("pickled", sorted(pickle.loads(pickle.dumps(part.optimizer)).__dict__))
        run.note("copied", sorted(copy.deepcopy(part.optimizer).__dict__))
    trainer.train(1)


# ------------------------------------------------------------------------------------ experts
@program("moe")
def a_loss_on_the_probabilities_that_a_dispatcher_keeps(run):
    trainer = run.trainer()
    (chunk,) = trainer.model.chunks
    modules = list(chunk.modules())
    dispatchers = [each.token_dispatcher for each in modules if hasattr(each, "token_dispatcher")]
    trainer.train(9)
    for data in range(2):
        trainer.model.zero_grad()
        backward(trainer, data, lambda: 10 * sum((each.probs**2).sum() for each in dispatchers))
        trainer.model.config.finalize_model_grads_func([chunk], None)
        trainer.update()


@program("moe", "ep")
def the_expert_bias_moves_every_second_step(run):
    trainer = run.trainer()
    config = trainer.model.config
    finalize, names = config.finalize_model_grads_func, ("local_tokens_per_expert", "global_tokens_per_expert")

    def without_the_bias(*args, **kwargs):
        with mock.patch.object(config, "moe_router_enable_expert_bias", False):
            for chunk in trainer.model.chunks:
                chunk.finish_grad_sync()

    for data in range(4):
        config.finalize_model_grads_func = finalize if data % 2 else without_the_bias
        trainer.model.zero_grad()
        buffers = [each for chunk in trainer.model.chunks for each in chunk.named_buffers()]
        run.note("counts", [value for name, value in buffers if name.endswith(names)])
        trainer.backward(data)
        run.note("counts", [value for name, value in buffers if name.endswith(names)])
        trainer.update()


# ------------------------------------------------------------------------------------ gradients reduced by hand
def _reduced_by_hand(run, reduce):
    trainer = run.trainer()
    (ddp,) = trainer.model.chunks
    trainer.train(0)
    for data in range(1, 4):
        trainer.model.zero_grad()
        with ddp.no_sync():
            backward(trainer, 2 * data)
            backward(trainer, 2 * data + 1)
        reduce(bucket_groups(ddp))
        run.note("gradients", [parameter.main_grad.detach() for parameter in trainer.parameters()])
        trainer.update()


@program(OVERLAPPED[0])
def a_bucket_group_reduced_by_hand(run):
    def last(groups):
        groups[-1].start_grad_sync()
        run.note("under way", groups[-1].grad_reduce_handle is not None)
        groups[-1].finish_grad_sync()

    _reduced_by_hand(run, last)


@program(*OVERLAPPED)
def bucket_groups_reduced_by_hand_from_last_to_first(run):
    def each(groups):
        for group in reversed(groups):
            group.start_grad_sync()
            run.note("under way", group.grad_reduce_handle is not None)
            group.finish_grad_sync()

    _reduced_by_hand(run, each)


@program(*OVERLAPPED)
def bucket_groups_started_by_hand_and_then_finished(run):
    def all_of_them(groups):
        for group in reversed(groups):
            group.start_grad_sync()
        for group in groups:
            group.finish_grad_sync()

    _reduced_by_hand(run, all_of_them)


def _zeroed_by(run, zero):
    trainer = run.trainer()
    (ddp,) = trainer.model.chunks
    for data in range(4):
        zero(ddp)
        run.raising(backward, trainer, data)
        run.raising(ddp.finish_grad_sync)
        run.note("gradients", [parameter.main_grad.detach() for parameter in trainer.parameters()])
        trainer.update()


@program("bf16, overlapped reduce", "fp32, sharded, overlaps", "bf16")
def buffers_zeroed_by_hand(run):
    def by_hand(ddp):
        for buffer in ddp.buffers:
            buffer.grad_data.zero_()

    _zeroed_by(run, by_hand)


@program("bf16, overlapped reduce", "fp32, sharded, overlaps", "bf16")
def buffers_zeroed_and_groups_reset_by_hand(run):
    def by_hand(ddp):
        for each in (*ddp.buffers, *bucket_groups(ddp)):
            each.reset()

    _zeroed_by(run, by_hand)


@program("bf16, overlapped reduce", "bf16")
def gradients_that_nobody_zeroes(run):
    _zeroed_by(run, lambda ddp: None)


# ------------------------------------------------------------------------------------ schedules
@program("fp32", "bf16, sharded")
def a_schedule_of_ones_own_is_loaded(run):
    trainer = run.trainer()
    trainer.train(0)
    kind = importlib.import_module("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
    calls = []

    class Noting(kind):
        def step(self, increment):
            calls.append(increment)
            super().step(increment)

    saved = trainer.schedule.state_dict()
    trainer.schedule = trainer.layout.schedule_of(trainer.optimizer)
    trainer.schedule.__class__ = Noting
    trainer.schedule.load_state_dict(saved)
    trainer.train(1)
    run.note("calls", calls)
