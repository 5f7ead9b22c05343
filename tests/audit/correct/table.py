"""Rows of correct trainers, and steps that several of them make."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rigs.mistakes import Mistake, unfinished


@dataclass(frozen=True)
class Correct(Mistake):
    """A correct trainer.

    Attributes:
        finds: notes, by rule, with the number of steps before.
        is_plain: whether its weights are those of three of Megatron's own steps on the same data, in one layout.
    """

    is_plain: bool = False


class Programs:
    """Correct trainers, by name."""

    def __init__(self) -> None:
        self.rows = {}

    def row(self, name, notes=None, *, layout=None, is_plain=False, **options):
        """Add the trainer that this decorates."""
        assert name not in self.rows
        self.rows[name] = None  # keeps the place of the first of several

        def add(take_step):
            self.rows[name] = Correct(name, "", take_step, notes or {}, layout or {}, options, is_plain=is_plain)
            return take_step

        return add


def as_megatron_does(model, step):
    model.train_step(step)


def made_once(model, name, make):
    """Return something that a model's trainer keeps, and is compared at the end."""
    if not hasattr(model, name):
        setattr(model, name, make())
    return getattr(model, name)


def seen(model, value):
    """Keep a number that a trainer logs, to be compared at the end."""
    made_once(model, "numbers", list).append(value)


def backward(model, step, **options):
    """Compute fresh gradients."""
    model.zero_grad()
    model.forward_backward(step, **options)


def own_backward(model, step, **options):
    """Compute fresh gradients of this rank's data alone."""
    with unfinished(model):
        backward(model, step, **options)


def average(tensors):
    for tensor in tensors:
        torch.distributed.all_reduce(tensor)
        tensor.div_(torch.distributed.get_world_size())


def gradients_of(model):
    return [buffer.grad_data for chunk in model.chunks for buffer in chunk.buffers]


def groups_of(model):
    """Return the parameter groups of torch's optimizers."""
    return model.optimizer.param_groups
