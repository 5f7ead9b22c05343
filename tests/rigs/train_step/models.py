"""Models, losses and calls for tests of TrainStep."""

from __future__ import annotations

from functools import partial
from unittest import mock

from megapatch.testing._data import forward_step

MEAN = {"two_tuple": True}
MOE = {
    "experts": 2,
    "config": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
}
MTP = {"config": {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3}}


def sum_forward_step(data, model, masked=True):
    """Return a loss function that returns (sum, metrics) over the tokens that count."""
    output, usual = forward_step(data, model, masked=masked)

    def loss_function(output):
        total, _, metrics = usual(output)
        return total, metrics

    return output, loss_function


def infinite_forward_step(data, model):
    """Return Megatron's loss, made infinite."""
    output, usual = forward_step(data, model, **MEAN)

    def loss_function(output):
        loss, metrics = usual(output)
        return loss * float("inf"), metrics

    return output, loss_function


def in_pieces(train_step, model, step, cut, loss=None, function=None, last=False):
    """Make the calls of an open step, with the data of Megatron's step of one call.

    loss   options of the usual forward step; None: the caller counts the tokens
    last   whether the last call says so
    """
    batches = iter(model.microbatches(step, sum(cut)))
    usual = sum_forward_step if loss is None else partial(forward_step, **loss)
    for index, size in enumerate(cut, start=1):
        piece = [next(batches) for _ in range(size)]
        iterators = [iter(piece) for _ in model.chunks]
        tokens = sum(int((batch[:, 1:] % 3 != 0).sum()) for batch in piece)
        train_step.forward_backward(
            forward_step_func=function or usual,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            num_microbatches=size,
            last=last and index == len(cut),
            count=tokens if loss is None else None,
            seq_length=model.seq,
            micro_batch_size=2,
        )


def allow_sequence_parallel():
    """Mark the parameters of torch's LayerNorm as Apex does, without which sequence parallelism is refused."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def new(cls, config, *args, **kwargs):
        sequence_parallel = config.sequence_parallel
        with mock.patch.object(config, "sequence_parallel", False):
            norm = original(cls, config, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = new
