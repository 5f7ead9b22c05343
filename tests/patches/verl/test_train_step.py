"""A TrainStep within verl's engine: however a step's samples are cut into calls, the step is the same.

See docs/verl.md.
"""

import pytest
import torch
from rigs.cells import run_cells
from rigs.verl.engine import ENGINES, find_verl, needs_verl
from rigs.verl.steps import LAYOUTS, SPLITS, cells

pytestmark = needs_verl


@pytest.fixture(scope="module")
def ranks():
    return run_cells(cells, 2, setup=find_verl, env={"VERL_RELEASE": ENGINES[-1].folder})


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_cut_is_the_same_step(ranks, layout):
    for found in ranks:
        norms, parameters = found[layout, SPLITS[0]]
        for split in SPLITS:
            if (layout, split) in found.values:
                assert found[layout, split][0] == norms
                assert same(found[layout, split][1], parameters)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_verls_own_step(ranks, layout):
    """But for bf16's rounding, 3e-3 here: verl divides losses by something else before the backward pass."""
    found = ranks[1]  # the last stage, where verl reports the norm
    assert found[layout, (2, 2)][0] == pytest.approx(found[layout, "whole"][0], rel=5e-3)


def test_without_it_two_calls_make_another_step(ranks):
    (failure, norm) = ranks[1]["without"]
    assert failure or norm != pytest.approx(ranks[1]["data parallel", "whole"][0][0], rel=0.1)


def test_a_call_that_fails_leaves_no_trace(ranks):
    for found in ranks:
        assert found["failed"] == ("AssertionError", True, 0.0)
