"""The job that the ranks run: sequences of a layout, each in a cell of its own, and what counts of them."""

from __future__ import annotations

import contextlib
import copy
import functools
import traceback
import warnings
from datetime import timedelta

import torch
from rigs.megatron.options import quick_writer

from megapatch._mcore.process_groups import process_groups
from megapatch.testing import init_parallel

from . import streams
from .layouts import LAYOUTS
from .operations import operate
from .pictures import differences
from .plan import TRAIN, Draws, OptimizerOf, RandomOf, Step, WeightsOf, plan
from .trainer import Trainer, weights_of

RAISES = "raises"
ALONE = timedelta(seconds=10)
"""How long a rank waits for the others in a collective; a sequence that leaves one alone is one that differs."""


def job(rank, world_size, folder, sequences):
    """Yield, for each sequence, a cell with what differs from its reference: {kind: words}.

    References come first: nothing that a sequence leaves in the process reaches them.
    """
    warnings.simplefilter("ignore", DeprecationWarning)
    init_parallel()
    quick_writer()
    references = {}
    for layout in dict.fromkeys(sequence.layout for sequence in sequences):
        set_up(LAYOUTS[layout])
        for sequence in sequences:
            if sequence.layout == layout:
                then = plan(sequence).then
                key = layout, then.program, then.steps, then.rate
                if key not in references:
                    references[key] = reference(rank, folder, layout, then)
    for sequence in sequences:
        planned = plan(sequence)
        then = planned.then
        key = sequence.layout, then.program, then.steps, then.rate
        yield sequence, functools.partial(outcome, rank, folder, planned.sequence, references[key])


def set_up(layout, alone=ALONE):
    """Set up the layout, with collectives that do not wait for ever."""
    layout.set_up()
    for group in (None, *process_groups()):
        with contextlib.suppress(ValueError):  # a group that this rank is not in
            torch.distributed.distributed_c10d._set_pg_timeout(alone, group)  # there is no public way


def reference(rank, folder, name, then):
    """Return what the last steps show after nothing but what counts, in a fresh model."""
    layout = LAYOUTS[name]
    with layout.in_use():
        trainer = Trainer(layout, rank, folder)
        do(trainer, then.program)
        trainer.set_rate(then.rate)
        trainer.schedule.num_steps = then.steps
        return trainer.last_steps()


def outcome(rank, folder, sequence, expected):
    found = after(rank, folder, sequence)
    return found if RAISES in found else differences(found, expected)


def after(rank, folder, sequence):
    """Return what the next two steps after the sequence show and leave, or what was raised before."""
    layout = LAYOUTS[sequence.layout]
    set_up(layout)
    operation = "building"
    with layout.in_use():
        try:
            trainer = Trainer(layout, rank, folder)
            for data, operation in enumerate(sequence.operations):
                operate(trainer, operation, data)
            if trainer.pending:
                operation = "finish the async save"
                operate(trainer, operation, 0)
            operation = "the next two steps"
            return trainer.last_steps()
        except Exception as error:
            return {
                RAISES: f"in {operation}: {type(error).__name__}: {error}",
                "traceback": traceback.format_exc(),
            }


# ------------------------------------------------------------------------ what counts
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
