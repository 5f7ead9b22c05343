"""The stubs: harmless where Megatron asks for CUDA, real where it asks for random numbers."""

from __future__ import annotations

import pickle
import sys
import threading
import types

import cloudpickle
import pytest
import torch
from rigs.megatron.options import UNPATCHED

from megapatch.errors import MisuseError
from megapatch.testing import init_parallel, install_cuda_stubs, run_ranks


def test_they_refuse_to_come_after_megatron(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    synchronize = torch.cuda.synchronize
    with pytest.raises(MisuseError, match="before the first import of megatron"):
        install_cuda_stubs()
    assert torch.cuda.synchronize is synchronize


def devices(rank, world_size):
    import megatron.core  # noqa: F401  (a second call is fine even now)

    install_cuda_stubs()
    made = [
        torch.zeros(1, device="cuda"),
        torch.empty(1, device=torch.device("cuda", 0)),
        torch.tensor([1.0], device=torch.cuda.current_device()),
        torch.ones(1).cuda(),
        torch.ones(1).to("cuda"),
        torch.ones(1).to(device="cuda:0", dtype=torch.bfloat16),
        torch.ones(1).pin_memory(),
        torch.nn.Linear(1, 1).cuda().weight,
        torch.nn.Linear(1, 1, device="cuda").weight,
        torch.ones(1).new_zeros(1, device="cuda"),
        torch.ones_like(torch.ones(1), device="cuda", pin_memory=True),
        torch.normal(0.0, 1.0, (1,), device="cuda"),
        torch.fft.fftfreq(1, device="cuda"),
        torch.nested.nested_tensor([torch.ones(1)], device="cuda"),
    ]
    with torch.device("cuda"):
        made.append(torch.zeros(1))
    with torch.device("meta"):
        assert torch.zeros(1).is_meta
    thread = threading.Thread(target=lambda: made.append(torch.zeros(1, device="cuda")))
    thread.start()
    thread.join()
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        torch.cuda.Event(enable_timing=True).record()
    torch.cuda.synchronize()
    return [tensor.device.type for tensor in made], torch.cuda.is_available(), torch.ones(1).type()


def test_cuda_means_cpu():
    found, available, type_name = run_ranks(devices, 1, env=UNPATCHED)[0]
    assert found == ["cpu"] * 16
    assert not available
    assert type_name == "torch.cuda.FloatTensor"  # what Megatron's optimizers want to see


def pickled(rank, world_size):
    functions = [torch.zeros, torch.tensor, torch.empty_like, torch.fft.fftfreq]
    return pickle.loads(pickle.dumps(functions)) == functions == cloudpickle.loads(cloudpickle.dumps(functions))


def test_functions_that_make_tensors_still_pickle():
    assert run_ranks(pickled, 1, env=UNPATCHED) == [True]


def draw(rank, world_size):
    from megatron.core import tensor_parallel

    init_parallel(tp=2)
    shared = torch.rand(3)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        own = torch.rand(3)
        with_a_device = torch.rand(3, device="cuda")
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    again = torch.rand(3)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        own_again = torch.rand(3)
    return shared, own, with_a_device, again, own_again


def test_the_random_state_tracker_does_its_work():
    first, second = run_ranks(draw, 2, env=UNPATCHED)
    shared, own, with_a_device, again, own_again = first
    assert torch.equal(shared, second[0])  # the default state is the same in a tensor-parallel group
    assert not torch.equal(own, second[1])  # the model-parallel one is not
    assert not torch.equal(own, with_a_device)
    assert torch.equal(shared, again)
    assert torch.equal(own, own_again)


def offloaded(rank, world_size):
    on_gpu = torch.ones(3, device="cuda")
    on_cpu = on_gpu.cpu().pin_memory()
    on_gpu.untyped_storage().resize_(0)  # as Megatron frees what it has offloaded
    return on_cpu.tolist()


def test_what_comes_to_the_cpu_is_a_copy():
    assert run_ranks(offloaded, 1, env=UNPATCHED) == [[1.0, 1.0, 1.0]]
