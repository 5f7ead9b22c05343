"""A split step whose worker is told which data are the last: the reduce overlaps, and the step is train()'s."""

import contextlib
from functools import partial

import pytest
from rigs.cells import once, run_cells
from rigs.megatron.grad_ready import Reduces
from rigs.megatron.options import assert_misuse, attempt, buckets
from rigs.nemo_rl.steps import LAYOUTS, SIZE, SLICES, differences, in_slices, samples, trained_gpt, whole
from rigs.nemo_rl.worker import GPT, SHAPES, batch, find_nemo_rl, has_own_split_step, nll_loss, worker_for

from megapatch.testing import init_parallel, tiny_gpt

RELEASES = [shape for shape in SHAPES if not has_own_split_step(shape)]
OVERLAPPING = ("dp2, overlap", "dp2, distributed optimizer, both")
KINDS = ("nll", "by sequences")

pytestmark = [
    pytest.mark.skipif(not RELEASES, reason="this NeMo-RL has a split step of its own"),
    pytest.mark.thorough,
]


def compared(rank, world_size):
    with contextlib.redirect_stdout(None):
        init_parallel()
        for name in OVERLAPPING:
            _, options = LAYOUTS[name]
            for loss in KINDS:
                expected = once(trained_gpt, options, loss, whole)
                for cut in SLICES:
                    yield (name, loss, cut), partial(cell, expected, options, loss, SLICES[cut])
            yield (name, "reduces"), partial(reduces, options)
        yield "nothing counts", nothing_counts
        yield "one more", one_more


def cell(expected, options, loss, sizes):
    reference = expected()
    found = differences(trained_gpt(options, loss, in_slices(sizes, tells=True)), reference)
    found.pop("keys")
    return found


def reduces(options):
    """By step: the bucket groups that are reduced before finish_train_step(), and all."""
    worker = worker_for(tiny_gpt(**GPT, **options))
    found = []
    for step in range(4):
        counted = Reduces()
        with counted.counted():
            in_slices(SLICES["four"], tells=True)(worker, step, nll_loss())
        found.append((counted.early, counted.early + counted.late))
    return buckets(worker.model), found


def nothing_counts():
    """Return the norm of a step of which no sample counts."""
    worker = worker_for(tiny_gpt(**GPT, **LAYOUTS["dp2, overlap"][1]))
    before = {name: parameter.clone() for name, parameter in worker.model.named_parameters()}

    def blank(data):
        data["sample_mask"] = data["sample_mask"] * 0
        return data

    result = in_slices(SLICES["two"], prepare=blank, tells=True)(worker, 0, nll_loss())
    assert all(before[name].equal(parameter) for name, parameter in worker.model.named_parameters())
    return float(result["grad_norm"])


def one_more():
    worker = worker_for(tiny_gpt(**GPT))
    worker.begin_train_step(nll_loss(), gbs=SIZE * worker.dp_size)
    worker.train_microbatch(samples(worker, 0), last=True)
    return attempt(worker.train_microbatch, batch(1, SIZE))


@pytest.fixture(scope="module", params=RELEASES)
def ranks(request):
    return run_cells(compared, 2, setup=find_nemo_rl, timeout=300, env={"NEMO_RL_SHAPE": request.param})


@pytest.mark.parametrize("cut", SLICES)
@pytest.mark.parametrize("loss", KINDS)
@pytest.mark.parametrize("layout", OVERLAPPING)
def test_the_step_is_that_of_train(ranks, layout, loss, cut):
    for found in ranks:
        assert {name: value for name, value in found[layout, loss, cut].items() if value > 1e-5} == {}


@pytest.mark.parametrize("layout", OVERLAPPING)
def test_every_bucket_group_is_reduced_in_the_last_data(ranks, layout):
    for found in ranks:
        groups, by_step = found[layout, "reduces"]
        assert by_step[2:] == [(groups, groups)] * 2  # Megatron has learned by then


def test_a_step_in_which_nothing_counts_is_dropped(ranks):
    assert [found["nothing counts"] for found in ranks] == [0.0, 0.0]


def test_nothing_comes_after_the_last_data(ranks):
    for found in ranks:
        assert_misuse(found["one more"], "the last call of this step was made")
