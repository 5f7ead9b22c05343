"""TrainStep and gathers under collectives that end late and in any order: each handle is waited for by itself.

Over gloo with one worker thread, waiting for the last handle of a group would do, and no other test would notice.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import pytest
import torch
from rigs.cells import cells_of, once
from rigs.late_collectives import make_collectives_late
from rigs.megatron.gathers import pair, wrong
from rigs.megatron.options import UNPATCHED, Interrupted, raising_half_way
from rigs.train_step.layouts import CASES, TOKENS, in_layouts, model_of
from rigs.train_step.models import in_pieces

from megapatch.train_step import TrainStep
from megapatch.weight_sync import gathered_parameters

STEPS = 3
CUT = (1, 1, 2)
LAYERS = {"layers": 4}  # for `raising_half_way`
NAMES = ("dp2, overlap", "dp2, distributed optimizer, overlap", "dp2, distributed optimizer, both")


def two_handles():
    """Return two tensors when only the later handle was waited for, and the first one when its own was, too."""
    first, second = torch.ones(4), torch.ones(4)
    handles = [torch.distributed.all_reduce(tensor, async_op=True) for tensor in (first, second)]
    handles[1].wait()
    before = first.tolist(), second.tolist()
    handles[0].wait()
    return before, first.tolist()


def whole(make):
    model = make()
    for step in range(STEPS):
        model.train_step(step, num_microbatches=sum(CUT), **TOKENS)
    model.gather_parameters()
    return model.parameters()


def in_calls(make, expected, aborted=False):
    """Return the fraction of the parameters that differs from those of whole steps."""
    model = make()
    train_step = TrainStep(model.chunks, model.optimizer)
    for step in range(STEPS):
        if aborted:
            with suppress(Interrupted), train_step, raising_half_way(model, sum(CUT) - 1):
                in_pieces(train_step, model, STEPS + step, CUT, TOKENS, last=True)
        with train_step:
            in_pieces(train_step, model, step, CUT, TOKENS, last=True)
            train_step.finish()
    model.gather_parameters()
    return wrong(model.parameters(), expected())


def read_after_steps():
    plain, model = pair()
    for step in range(STEPS):
        plain.train_step(step)
        model.train_step(step)
        gathered_parameters(model.chunks)
        if found := wrong(model.parameters(), plain.parameters()):
            return found
    return 0.0


def job(rank, world_size):
    yield "two handles", two_handles
    for name, layout, options, _ in in_layouts(CASES, world_size, NAMES):
        make = partial(model_of, layout, {**options, **LAYERS})
        expected = once(whole, make)
        yield (name, "in calls"), partial(in_calls, make, expected)
        yield (name, "after aborts"), partial(in_calls, make, expected, aborted=True)
    yield "read", read_after_steps


ranks = cells_of(job, 2, setup=make_collectives_late, env=UNPATCHED)


def test_a_result_is_there_when_its_own_handle_was_waited_for(ranks):
    for found in ranks:
        (first, second), after = found["two handles"]
        assert second == after == [2.0] * 4
        assert all(value != value for value in first)  # NaN


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["in calls", "after aborts"])
def test_a_step_in_calls_is_a_whole_one(ranks, name, what):
    assert [found[name, what] for found in ranks] == [0.0, 0.0]


def test_a_read_has_every_gather(ranks):
    assert [found["read"] for found in ranks] == [0.0, 0.0]
