"""Where the checks of this folder run: two ranks on CPU, and one rank a visible GPU over NCCL."""

from __future__ import annotations

import pytest

from megapatch._versions import find_module

if find_module("torch") is None or find_module("megatron.core") is None:
    collect_ignore_glob = ["test_*.py"]

NO_GPU = "no GPU is visible"


def gpus():
    import torch

    return torch.cuda.device_count()


@pytest.fixture(params=["cpu", "cuda"])
def place(request):
    """Return the device and the number of ranks."""
    if request.param == "cpu":
        return "cpu", 2
    if not gpus():
        pytest.skip(NO_GPU)
    return "cuda", gpus()


@pytest.fixture
def on_gpus(place):
    """Return the number of ranks; there is nothing to see on CPU."""
    device, ranks = place
    if device == "cpu":
        pytest.skip("the CUDA stubs have no memory, no graphs and no compiler")
    return ranks
