"""Where these checks run: two ranks on CPU, one rank a visible GPU over NCCL, and two on one GPU over gloo."""

from __future__ import annotations

import pytest
from rigs.gpu.places import CPU, NCCL, SHARED, gpus

NO_GPU = "no GPU is visible"


@pytest.fixture(params=["CPU", "NCCL", "SHARED"])
def place(request):
    """Return a Place to run in."""
    if request.param == "CPU":
        return CPU
    if not gpus():
        pytest.skip(NO_GPU)
    return NCCL() if request.param == "NCCL" else SHARED


@pytest.fixture
def on_gpus():
    """Return the Place of all visible GPUs: there is nothing to see on CPU."""
    if not gpus():
        pytest.skip(f"{NO_GPU}, and the CUDA stubs have no memory, no graphs and no compiler")
    return NCCL()
