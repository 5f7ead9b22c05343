"""A step in pieces with FSDP2 and tensor parallelism, at four ranks, against the same steps in one process.

Some layers are tensor parallel, on a mesh of two dimensions, and others are not.
"""

from __future__ import annotations

import pytest
import torch
from rigs.cells import run_cells
from rigs.megatron.options import attempt
from rigs.train_step.fsdp import Sharded, device_mesh, largest_difference, optimizers, reference
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megapatch.train_step import TrainStep

pytestmark = pytest.mark.thorough  # needs no Megatron at all
STEPS = range(2)
CUTS = {"two": ((2, 2), (2, 2)), "uneven": ((1, 2), (3, 1))}
CLIP = 0.1
CASES = {  # options, options of the reference
    "mean": ({}, {}),
    "count, clip": ({"counting": True, "max_grad_norm": CLIP}, {"counting": True, "max_grad_norm": CLIP}),
}


class Paired(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.last = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, values):
        return self.last(torch.tanh(self.down(torch.tanh(self.up(values)))))


def plain():
    torch.manual_seed(3)
    return Paired().double()


def parallel(mesh):
    model = parallelize_module(plain(), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def computed(rank, world_size):
    mesh = device_mesh((2, 2), "data", "tensor")
    data = mesh.get_local_rank("data")
    for case, (options, others) in CASES.items():
        for cut, sizes in CUTS.items():

            def cell(options=options, others=others, sizes=sizes):
                sharded = Sharded(data, model=parallel(mesh), data_parallel_dims=("data",), **options)
                found = []
                for step in STEPS:
                    norm = sharded.step(step, sizes).grad_norm
                    found.append((norm, sharded.state()))
                expected = reference(STEPS, sizes, model=plain(), **others)
                return [
                    (norm - other_norm, largest_difference(state, other))
                    for (norm, state), (other_norm, other) in zip(found, expected, strict=True)
                ]

            yield (case, cut), cell
    yield "errors", lambda: errors(mesh)


def errors(mesh):
    model = parallel(mesh)
    optimizer, _ = optimizers(model)
    return {
        "not named": attempt(TrainStep, model, optimizer),
        "unknown": attempt(TrainStep, model, optimizer, data_parallel_dims=("dp",)),
        "too many": attempt(TrainStep, model, optimizer, data_parallel_dims=("data", "tensor")),
    }


@pytest.fixture(scope="module")
def ranks():
    return run_cells(computed, 4, timeout=120)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("case", CASES)
def test_the_pieces_give_the_step_of_one_process(ranks, case, cut):
    for found in ranks:
        for norm, difference in found[case, cut]:
            assert abs(norm) <= 1e-12
            assert difference <= 1e-12


def test_errors(ranks):
    for found in (rank["errors"] for rank in ranks):
        kind, text = found["not named"]
        assert kind == "MisuseError" and 'data_parallel_dims=("data",)' in text
        kind, text = found["unknown"]
        assert kind == "MisuseError" and text.startswith("data_parallel_dims has dp; a parameter's mesh has data")
        kind, text = found["too many"]
        assert kind == "MisuseError" and "data_parallel_dims has tensor; a parameter's mesh has data" in text
