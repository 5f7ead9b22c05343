"""Megatron in a process of its own, for the examples."""

from __future__ import annotations

import torch

from megapatch.testing import init_parallel, use_one_gloo_thread


def join_alone() -> None:
    """Set up torch.distributed and Megatron's parallel state with this process as the only rank."""
    use_one_gloo_thread()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    init_parallel()
