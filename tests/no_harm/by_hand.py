"""Programs of what people do by hand around one normal call of Megatron's."""

from __future__ import annotations

from unittest import mock

from megapatch._mcore.bucket_groups import bucket_groups
from megapatch.testing._data import forward_step

from .table import program

OVERLAPPED = ("bf16, overlapped reduce", "fp32, sharded, overlaps")


def backward(trainer, data, loss_of_own=lambda: 0.0):
    """Run one microbatch forward and backward, without a schedule."""
    (chunk,) = trainer.model.chunks
    output, loss_function = forward_step(iter(trainer.model.microbatches(data, 1)), chunk, two_tuple=True)
    loss, _ = loss_function(output)
    trainer.run.note("loss", loss.detach())
    (loss + loss_of_own()).backward()


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
def buffers_zeroed_and_groups_reset_by_hand(run):
    def by_hand(ddp):
        for each in (*ddp.buffers, *bucket_groups(ddp)):
            each.reset()

    _zeroed_by(run, by_hand)


@program("bf16, overlapped reduce", "bf16")
def gradients_that_nobody_zeroes(run):
    _zeroed_by(run, lambda ddp: None)
