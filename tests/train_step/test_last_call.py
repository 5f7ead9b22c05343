"""A call that is said to be the step's last one reduces during its backward pass, as Megatron's own last
microbatch does; without that, the reduce waits for finish()."""

from __future__ import annotations

from functools import partial

import pytest
from rigs.cells import run_cells
from rigs.megatron.grad_ready import Reduces
from rigs.megatron.options import BOTH, GRADS, UNPATCHED, assert_same_parameters
from rigs.train_step.models import MEAN, MOE, in_pieces

from megapatch.testing import init_parallel, tiny_gpt
from megapatch.train_step import TrainStep

STEPS = 4
LAYOUTS = {  # number of ranks, layout, options
    "dp2": (2, {}, GRADS),
    "dp2, both": (2, {}, BOTH),
    "ep2": (2, {"ep": 2}, {**MOE, **GRADS}),
    "pp2 dp2": (4, {"pp": 2}, {**GRADS, "align_grad_reduce": False}),
}


def reduces_by_step(options, last):
    """Return, by step, how many bucket groups are reduced before finish_grad_sync(), and how many in all.

    Four steps, whose number of microbatches varies.
    """
    model = tiny_gpt(**options)
    step = TrainStep(model.chunks, model.optimizer)
    return [_reduces(model, step, cut, last) for cut in [(1, 1), (2, 1), (1, 2), (1, 1, 1)]]


def _reduces(model, step, cut, last):
    reduces = Reduces()
    with reduces.counted(), step:
        in_pieces(step, model, 0, cut, MEAN, last=last)
        in_backward = reduces.early
        step.finish()
    return in_backward, reduces.early + reduces.late


def of_virtual_stages():
    """The norms of steps whose last call is told, of a config without a no_sync_func, and of steps of one call."""
    init_parallel(pp=2, vpp=2)
    model, expected = tiny_gpt(layers=4, hooks=False, **GRADS), tiny_gpt(layers=4)
    step = TrainStep(model.chunks, model.optimizer)
    norms = []
    for index in range(2):
        with step:
            in_pieces(step, model, index, (2, 2), MEAN, last=True)
            norms.append(
                (step.finish().grad_norm, expected.train_step(index, num_microbatches=4, **MEAN).grad_norm)
            )
    assert_same_parameters(model.parameters(), expected.parameters())
    return norms


def found_by(rank, world_size):
    for name, (ranks, layout, options) in LAYOUTS.items():
        if ranks == world_size:
            init_parallel(**layout)
            for last in (True, False):
                yield (name, last), partial(reduces_by_step, options, last)
    if world_size == 4:
        yield "virtual stages", of_virtual_stages


@pytest.fixture(scope="module", params=["with patches", "without"])
def of_ranks(request):
    env = UNPATCHED if request.param == "without" else {}
    return {ranks: run_cells(found_by, ranks, env=env) for ranks in (2, 4)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_bucket_group_is_reduced_in_the_last_backward_pass(of_ranks, name):
    for found in of_ranks[LAYOUTS[name][0]]:
        for in_backward, in_all in found[name, True][2:]:  # Megatron has learned by then
            assert in_backward == in_all >= 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_otherwise_none_is(of_ranks, name):
    for found in of_ranks[LAYOUTS[name][0]]:
        told, not_told = found[name, True], found[name, False]
        assert [in_backward for in_backward, _ in not_told] == [0] * STEPS
        assert [in_all for _, in_all in not_told] == [in_all for _, in_all in told]


def test_each_virtual_stage_is_in_its_own_no_sync(of_ranks):
    for found in of_ranks[4]:
        for norm, expected in found["virtual stages"]:
            assert norm == pytest.approx(expected, rel=1e-6)
