"""Worlds of ranks for the checks for GPUs."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
import torch

from megapatch.testing import RanksFailed, run_ranks


class Place(NamedTuple):
    """Where ranks run.

    Attributes:
        device: "cpu" or "cuda".
        ranks: number of ranks.
        backend: None for the one that `run_ranks` takes.
    """

    device: str
    ranks: int
    backend: str | None = None

    def run(self, function, *args, **options):
        """Call the function on the ranks; skip the test where the backend lacks a collective for this device."""
        try:
            return run_ranks(function, self.ranks, *args, device=self.device, backend=self.backend, **options)
        except RanksFailed as error:
            if self.backend and (reason := lacks(error)):
                pytest.skip(reason)
            raise


def lacks(error):
    """Return what gloo says of a collective that it does not have for a GPU, or None."""
    found = re.search(r"^.*(?:unsupported device type|Gloo.*(?:does not|not) support).*$", str(error), re.I | re.M)
    return found and found[0].strip()


def gpus():
    return torch.cuda.device_count()


CPU = Place("cpu", 2)
SHARED = Place("cuda", 2, "gloo")


def NCCL():
    return Place("cuda", gpus())
