"""The part of a sequence that counts, in a fresh model: without loads, but for an optimizer's state dict."""

from __future__ import annotations

import copy

from . import streams
from .operations import operate
from .plan import TRAIN, Draws, OptimizerOf, RandomOf, Step, WeightsOf
from .trainer import Trainer, weights_of


def do(trainer, program):
    for item in program:
        if isinstance(item, WeightsOf):
            _set_weights(trainer, item.program)
        elif isinstance(item, OptimizerOf):
            other, _ = _after(trainer, item.program)
            trainer.model.optimizer.load_state_dict(copy.deepcopy(other.model.optimizer.state_dict()))
        elif isinstance(item, RandomOf):
            streams.put(_after(trainer, item.program)[1])
        elif isinstance(item, Draws):
            _draw(trainer, item)
        else:
            assert isinstance(item, Step)
            trainer.set_rate(item.rate)
            trainer.step(item.data, "step" if item.kind == TRAIN else item.kind)


def _after(trainer, program):
    """Return a fresh trainer that has done the program, and the random streams as it leaves them."""
    before = streams.take()
    other = _another(trainer)
    do(other, program)
    found = streams.take()
    streams.put(before)
    return other, found


def _draw(trainer, item):
    """Draw what the operation draws, with another model."""
    before = streams.take()
    other = _another(trainer)
    streams.put(before)
    operate(other, item.operation, item.data)


def _set_weights(trainer, program):
    other, _ = _after(trainer, program)
    other.model.gather_parameters()
    trainer.model.gather_parameters()
    for mine, theirs in zip(trainer.models(), other.models(), strict=True):
        mine.load_state_dict(weights_of(theirs), strict=False)
    trainer.model.optimizer.reload_model_params()


def _another(trainer):
    return Trainer(trainer.layout, trainer.rank, trainer.folder)
