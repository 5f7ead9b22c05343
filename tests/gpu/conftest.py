"""Where these checks run: two ranks on CPU, and at least two over NCCL."""

from __future__ import annotations

import pytest
from rigs.gpu.places import CPU, gpus
from rigs.gpu.places import on_gpus as place_on_gpus

NO_GPU = "no GPU is visible"


@pytest.fixture(params=["cpu", "cuda"])
def place(request):
    """Return a Place to run in."""
    return CPU if request.param == "cpu" else request.getfixturevalue("on_gpus")


@pytest.fixture
def on_gpus():
    """Return the Place of all visible GPUs: there is nothing to see on CPU."""
    if not gpus():
        pytest.skip(f"{NO_GPU}, and the CUDA stubs have no memory, no graphs and no compiler")
    return place_on_gpus()
