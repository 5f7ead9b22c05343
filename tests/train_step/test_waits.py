"""TrainStep waits for the device where docs/benchmarks.md says, and nowhere else. The CPU stands for a GPU."""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from rigs.cells import cells_of
from rigs.megatron.options import GRADS
from rigs.train_step.layouts import CASES, in_layouts, model_of
from rigs.train_step.models import in_pieces

import megapatch
from megapatch._verify.operations import Operations
from megapatch.train_step import TrainStep

PACKAGE = Path(megapatch.__file__).parent
TOTAL_TOKENS = "self.normalizer = float(self.num_tokens)  # finalize has summed it over all ranks"
TOTAL_COUNT = "return float(count)"
AGREED = "failed, *values = found.tolist()"
EXPECTED = {
    "dp2, mean": [],
    "dp2, tokens, overlap": [TOTAL_TOKENS],
    "dp2, count": [TOTAL_COUNT],
    "pp2": [AGREED],
    "tp2": [AGREED],
}
COUNTED = {"dp2, count": (2, {}, GRADS, None)}


class OurWaits(Operations):
    """Counts the waits by the line of TrainStep, or of what it is made of, that waits."""

    def __init__(self):
        super().__init__()
        self.lines = Counter()

    def _note(self, *args, **kwargs):
        super()._note(*args, **kwargs)
        frame = sys._getframe(1)
        while frame is not None and ("/torch/" in (path := frame.f_code.co_filename) or "operations.py" in path):
            frame = frame.f_back
        if self.found[-1].is_wait and frame is not None:
            folders = Path(path).parents
            if PACKAGE in folders and PACKAGE / "testing" not in folders:
                self.lines[linecache.getline(path, frame.f_lineno).strip()] += 1


def waits(layout, options, loss):
    """Return the lines that wait in the last of three steps; its last call is not known to be that."""
    model = model_of(layout, options)
    step = TrainStep(model.chunks, model.optimizer, **({} if loss else {"expected_count": 100.0}))
    for number in range(3):
        with OurWaits() as found, step:
            in_pieces(step, model, number, (1, 1), loss, last=number == 1)
            step.finish()
    return [*found.lines.elements()]


def job(rank, world_size):
    for name, layout, options, loss in in_layouts({**CASES, **COUNTED}, world_size, EXPECTED):
        yield name, partial(waits, layout, options, loss)


ranks = cells_of(job, 2)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_step_of_several_calls_waits_where_the_page_says(ranks, name):
    assert [found[name] for found in ranks] == [EXPECTED[name]] * 2
