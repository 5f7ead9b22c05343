"""Data that depends only on the step, and the forward step and loss that train on it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

LossFunction = Callable[[torch.Tensor], tuple[Any, ...]]


def microbatches(
    step: int, count: int, *, micro_batch_size: int = 2, seq: int = 8, vocab: int = 32, seed: int = 0
) -> list[torch.Tensor]:
    """Make this data-parallel rank's microbatches of a step.

    The step's global batch has ``count * data parallel size`` microbatches. The i-th depends only on
    (seed, step, i), and goes to rank ``i % data parallel size``.

    Args:
        step: number of the step, from 0 on.
        count: microbatches of this rank.
        micro_batch_size: samples of a microbatch.
        seq: tokens of a sample.
        vocab: tokens are from 0 to ``vocab - 1``.
        seed: selects other data.

    Returns:
        `count` int64 tensors of shape (micro_batch_size, seq + 1): tokens, of which the first `seq` are the input
        and the last `seq` the labels.
    """
    from megatron.core import parallel_state

    dp, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    return [
        torch.randint(vocab, (micro_batch_size, seq + 1), generator=_generator(seed, step, index))
        for index in range(rank, count * dp, dp)
    ]


def _generator(seed: int, step: int, index: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 10_000 + step) * 10_000 + index)


def loss_mask(labels: torch.Tensor, masked: bool) -> torch.Tensor:
    """Return which tokens count, as floats in the shape of `labels`.

    All of them, or (masked) about two in three, so that microbatches differ in their number of tokens.
    """
    return (labels % 3 != 0).float() if masked else torch.ones_like(labels, dtype=torch.float32)


def loss_function(mask: torch.Tensor, output: torch.Tensor, two_tuple: bool = False) -> tuple[Any, ...]:
    """Return a microbatch's loss as Megatron's schedules take it.

    (sum, number of tokens, metrics), or the older (mean, metrics). The metrics' "loss" is a tensor
    [sum, number of tokens].
    """
    loss = (output.float() * mask).sum()
    tokens = mask.sum().to(torch.int)
    metrics = {"loss": torch.stack([loss.detach(), tokens.float()])}
    tokens = _as_counted(tokens)
    return (loss / tokens, metrics) if two_tuple else (loss, tokens, metrics)


def _as_counted(tokens: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens that this Megatron expects, given that of this rank's part of the sequences.

    Up to 0.12 numbers are added up over data-parallel ranks only, and a loss function has to return the number of
    the whole sequences. Where it does not, each context-parallel rank divides the gradients by its own number, and
    their models drift apart.
    """
    from megatron.core import distributed, parallel_state

    size = parallel_state.get_context_parallel_world_size()
    if size > 1 and "with_context_parallel" not in inspect.getsource(distributed.finalize_model_grads):
        tokens = tokens.clone()
        torch.distributed.all_reduce(tokens, group=parallel_state.get_context_parallel_group())
    return tokens


def forward_step(
    data: Iterator[torch.Tensor], model: Any, *, two_tuple: bool = False, masked: bool = False
) -> tuple[torch.Tensor, LossFunction]:
    """Take one microbatch and run the model on it: Megatron's forward step function."""
    tokens = next(data).cuda()
    inputs, labels = (_of_this_rank(part) for part in (tokens[:, :-1], tokens[:, 1:]))
    batch, seq = inputs.shape
    hidden_positions = torch.triu(torch.ones(seq, seq, dtype=torch.bool, device="cuda"), 1)[None, None]
    positions = torch.arange(seq, device="cuda").expand(batch, -1)
    output = model(inputs, positions, hidden_positions, labels=labels)
    return output, partial(loss_function, loss_mask(labels, masked), two_tuple=two_tuple)


def _of_this_rank(tokens: torch.Tensor) -> torch.Tensor:
    """Return this context-parallel rank's part of each sequence."""
    from megatron.core import parallel_state

    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    return tokens.chunk(size, dim=1)[rank]
