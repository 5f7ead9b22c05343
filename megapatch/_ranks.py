"""This process's rank, the number of ranks, and their store."""

from __future__ import annotations

import os
import sys
from typing import Any

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
"""Variables of launchers; Slurm's last, as all ranks that mpirun starts inherit those of their batch script."""


def place() -> tuple[int, int, bool]:
    """Return this rank, the number of ranks, and whether torch.distributed says so, or else a launcher."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), True
    return _variable(0, *RANKS), _variable(1, *_SIZES), False


def _variable(otherwise: int, *names: str) -> int:
    return next((int(text) for name in names if (text := os.environ.get(name, "")).isdecimal()), otherwise)


def default_store() -> Any:
    """Return the store in which the ranks of torch.distributed have met."""
    from torch.distributed import distributed_c10d

    # Private, and the only way to the store of every kind of start: torch 2.1 to 2.15.
    return distributed_c10d._get_default_store()
