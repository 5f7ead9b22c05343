"""megatron.torch-fsdp2-finalize: the real class around a layer, at 2 ranks, with a mesh on CPU."""

import importlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from rigs.cells import cells_of
from rigs.megatron.options import UNPATCHED, attempt
from rigs.megatron.save import minor
from torch.distributed.device_mesh import DeviceMesh

from megapatch.testing import init_parallel, tiny_gpt

CPU_MESH = SimpleNamespace(from_group=lambda group, device: DeviceMesh.from_group(group, "cpu"))


def finalized(rank):
    """The error of finalize_model_grads(), and the gradient of the sum over inputs of 1 and of 2."""
    from megatron.core.distributed import finalize_model_grads

    module = importlib.import_module("megatron.core.distributed.torch_fully_sharded_data_parallel")
    model = tiny_gpt()
    layer = torch.nn.Linear(4, 2)
    with mock.patch.object(module, "DeviceMesh", CPU_MESH):
        fsdp2 = module.TorchFullyShardedDataParallel(model.config, model.ddp_config, layer)
    fsdp2(torch.full((1, 4), rank + 1.0)).sum().backward()
    _, error = attempt(finalize_model_grads, [fsdp2])
    return error, layer.weight.grad.full_tensor().tolist()


def job(rank, world_size):
    init_parallel()
    yield "finalized", lambda: finalized(rank)


unpatched = cells_of(job, 2, env=UNPATCHED)
patched = cells_of(job, 2)


@pytest.mark.skipif(minor() not in (16, 17, 18), reason="0.16 to 0.18 have the defect")
@pytest.mark.quick
def test_without_the_patch_gradients_cannot_be_finalized(unpatched):
    for found in unpatched:
        assert "unexpected keyword argument 'force_all_reduce'" in found["finalized"][0]


@pytest.mark.quick
def test_gradients_are_finalized(patched):
    for found in patched:
        assert found["finalized"] == (None, [[1.5] * 4] * 2)
