"""nemo_rl.split-train-step: the four methods on NeMo-RL's own worker against its own train(), at 2 ranks."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
from rigs.cells import once, run_cells
from rigs.nemo_rl.steps import LAYOUTS, LOSSES, SLICES, SPLIT_KEYS, differences, in_slices, trained_gpt, whole
from rigs.nemo_rl.worker import SHAPES, find_nemo_rl

from megapatch.testing import init_parallel

pytestmark = pytest.mark.thorough


def compared(rank, world_size):
    with contextlib.redirect_stdout(None):
        for name, (layout, options) in LAYOUTS.items():
            init_parallel(**layout)
            for loss in LOSSES:
                expected = once(trained_gpt, options, loss, whole)
                for cut, sizes in SLICES.items():
                    yield (name, loss, cut), partial(cell, expected, options, loss, sizes)


def cell(expected, options, loss, sizes):
    reference = expected()
    return differences(trained_gpt(options, loss, in_slices(sizes)), reference)


@pytest.fixture(scope="module", params=SHAPES)
def ranks(request):
    shape = {"NEMO_RL_SHAPE": request.param}
    return run_cells(compared, 2, audited=True, setup=find_nemo_rl, timeout=580, env=shape)


@pytest.mark.parametrize("cut", SLICES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_in_slices_is_that_of_train(ranks, layout, loss, cut):
    for found in ranks:
        differences = found[layout, loss, cut]
        assert differences.pop("keys") == SPLIT_KEYS
        assert {name: value for name, value in differences.items() if value > 1e-5} == {}
