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
OVERLAPS = {
    "": {},
    ", gradients overlap": {"overlap_grad_reduce": True},
    ", both overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True},  # of a distributed optimizer
}


class Models(NamedTuple):
    """A row of MODELS, which has each of the flags of overlap that it can have."""

    options: dict[str, Any]  # of tiny_gpt
    sizes: Mapping[str, int] = MappingProxyType({})  # of the layout
    freed_unpatched: bool = False  # its objects, without overlap_param_gather; groups of its layouts never are

    @property
    def freed_late(self) -> bool:
        """Whether only the next layout frees its objects and groups."""
        return "overlap_param_gather" in self.options


MODELS = {
    "dense, fp32": Models({"optimizer": "adam"}, freed_unpatched=True),
    "dense, bf16, sharded": Models(BF16, freed_unpatched=True),
    "dense, tensor-parallel": Models(BF16, {"tensor_model_parallel_size": 2}, freed_unpatched=True),
    "dense, pipeline": Models(BF16, {"pipeline_model_parallel_size": 2}, freed_unpatched=True),
    "experts, all-to-all": Models(experts("alltoall"), {"expert_model_parallel_size": 2}),
    "experts, all-gather": Models(experts("allgather"), {"expert_model_parallel_size": 2}),
    "dense, fp32, sharded": Models(SHARDED),
}
ROWS = {
    name + overlap: models._replace(options={**models.options, **flags})
    for name, models in MODELS.items()
    for overlap, flags in OVERLAPS.items()
    if "use_distributed_optimizer" in models.options or "overlap_param_gather" not in flags
}


def job(rank, world_size):
    for name, models in ROWS.items():
        yield name, functools.partial(cycles, CYCLES, models.options, **models.sizes)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "patched"])
def found(request):
    return request.param, run_cells(job, 2, env={} if request.param else UNPATCHED)


@pytest.mark.nightly
@pytest.mark.thorough
@pytest.mark.parametrize("name", ROWS)
def test_what_is_left_after_a_cycle_does_not_grow(found, name):
    """Without the patches groups do, of each layout, and experts that have trained."""
    patched, ranks = found
    models = ROWS[name]
    for rank in ranks:
        alive, sizes, groups, *_ = zip(*rank[name], strict=True)
        if patched or (models.freed_unpatched and not models.freed_late):
            assert len(set(alive)) == 1 and bool(alive[0]) is models.freed_late
        elif not (models.freed_unpatched and models.sizes):  # those grow by no number that can be said
            assert min(alive) > 0 and sizes[-1] - sizes[0] > (CYCLES - 1) * 15_000
        if patched:
            # The least of each half: a thread may hold a tensor of a collective for a moment more.
            assert min(sizes[CYCLES // 2 :]) <= min(sizes[1 : CYCLES // 2])
            assert len(set(groups[1:])) == 1  # the row before may be freed late
        else:
            assert groups[-1] >= groups[0] + 14 * (CYCLES - 1)
