"""Streams of parameters right after a step, gathered first, in layouts of four ranks."""

from functools import partial

import pytest
from rigs.cells import cells_of
from rigs.megatron.gathers import PLAIN, export, gathers_of_one_rank_as_with_nccl, pair, unwrapped, wrong

from megapatch.patches._readers import Reader
from megapatch.testing import init_parallel

STEPS = 3
MOE = {"experts": 4}
# The first chunk's gather begins within the optimizer's step, before the other chunks' and the experts' optimizers
# step. Its experts' gather begins then, too: too early where several ranks have the same experts, and over gloo in
# any case (see gathers_of_one_rank_as_with_nccl).
IN_THE_STEP = {"optim": {**PLAIN["optim"], "overlap_param_gather_with_optimizer_step": True}}
LAYOUTS = {  # the layout, the model's options, and how much of it is at least wrong without a gather
    "dp2 pp2": ({"pp": 2}, {}, 0.2),
    "dp2 pp2 vpp2": ({"pp": 2, "vpp": 2}, {}, 0.2),
    "dp2 pp2 vpp2, gathered in the step": ({"pp": 2, "vpp": 2}, IN_THE_STEP, 0.15),
    "dp2 pp2 vpp2 ep2, gathered in the step": ({"pp": 2, "vpp": 2, "ep": 2}, {**MOE, **IN_THE_STEP}, 0.02),
    "dp2 tp2": ({"tp": 2}, {}, 0.2),
    "dp4 ep2": ({"ep": 2}, MOE, 0.2),
}
streamed = Reader("export", "chunks", stream=True).gather_first(export)


def in_layout(sizes, **options):
    """By step: the fraction of a stream that is wrong without a gather, and with."""
    plain, model = pair(layers=4, **options)
    found = []
    for step in range(STEPS):
        plain.train_step(step)
        with gathers_of_one_rank_as_with_nccl():
            model.train_step(step)
        chunks, expected = ([unwrapped(chunk) for chunk in each.chunks] for each in (model, plain))
        without = dict(export(chunks))
        expected = dict(export(expected))
        found.append((wrong(without, expected), wrong(dict(streamed(chunks)), expected)))
    return found


def in_layouts(rank, world_size):
    for name, (sizes, options, _) in LAYOUTS.items():
        init_parallel(**sizes)
        yield name, partial(in_layout, sizes, **options)


four = cells_of(in_layouts, 4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_streams_in_layouts(four, name):
    for found in four:
        for before, after in found[name]:
            assert before > LAYOUTS[name][2]
            assert after == 0
