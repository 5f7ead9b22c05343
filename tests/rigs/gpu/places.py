"""Worlds of ranks for the checks for GPUs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megapatch.testing import run_ranks


class Place(NamedTuple):
    """Where ranks run.

    Attributes:
        device: "cpu" or "cuda".
        ranks: number of ranks.
    """

    device: str
    ranks: int

    def run(self, function, *args, **options):
        return run_ranks(function, self.ranks, *args, device=self.device, **options)


def gpus():
    return torch.cuda.device_count()


CPU = Place("cpu", 2)


def on_gpus():
    """Return a rank a GPU, and two where there is only one, which they share."""
    return Place("cuda", max(2, gpus()))
