"""Ten cycles of setting up a layout, building a model, training and dropping it: what is left after each."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from rigs.cells import run_cells
from rigs.megatron.options import UNPATCHED
from rigs.megatron.process_groups import SHARDED, cycles, experts

CYCLES = 10
BF16 = {**SHARDED, "dtype": "bf16"}
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}


class Models(NamedTuple):
    """A row of MODELS."""

    options: dict[str, Any]  # of tiny_gpt
    sizes: Mapping[str, int] = MappingProxyType({})  # of the layout
    freed_unpatched: bool = False  # its objects; groups of its layouts never are
    freed_late: bool = False  # by the next layout, whose groups are one cycle late, too


MODELS = {
    "dense, fp32": Models({"optimizer": "adam"}, freed_unpatched=True),
    "dense, bf16, sharded": Models(BF16, freed_unpatched=True),
    "dense, tensor-parallel": Models(BF16, {"tensor_model_parallel_size": 2}, freed_unpatched=True),
    "dense, pipeline": Models({**BF16, "overlap_grad_reduce": True}, {"pipeline_model_parallel_size": 2}, True),
    "experts, all-to-all": Models(experts("alltoall"), {"expert_model_parallel_size": 2}),
    "experts, all-gather": Models(experts("allgather"), {"expert_model_parallel_size": 2}),
    "dense, fp32, sharded": Models(SHARDED),
    "dense, bf16, both overlaps": Models({**BF16, **OVERLAPS}, freed_late=True),
}


def job(rank, world_size):
    for name, models in MODELS.items():
        yield name, functools.partial(cycles, CYCLES, models.options, **models.sizes)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "patched"])
def found(request):
    return request.param, run_cells(job, 2, env={} if request.param else UNPATCHED)


@pytest.mark.nightly
@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_what_is_left_after_a_cycle_does_not_grow(found, name):
    """Without the patches groups do, of each layout, and experts that have trained."""
    patched, ranks = found
    models = MODELS[name]
    for rank in ranks:
        alive, sizes, groups, *_ = zip(*rank[name], strict=True)
        if patched or models.freed_unpatched:
            assert len(set(alive)) == 1 and bool(alive[0]) is models.freed_late
        else:
            assert min(alive) > 0 and sizes[-1] - sizes[0] > (CYCLES - 1) * 50_000
        if patched:
            # The least of each half: a thread may hold a tensor of a collective for a moment more.
            assert min(sizes[CYCLES // 2 :]) <= min(sizes[1 : CYCLES // 2])
            assert len(set(groups[models.freed_late :])) == 1
        else:
            assert groups[-1] >= groups[0] + 14 * (CYCLES - 1)
