"""Random streams: the default one, and those of Megatron's tracker."""

from __future__ import annotations

import torch

SEED = 123
DEFAULT = "default"


def seed():
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(SEED)


def take():
    """Return where each stream is, by name."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = {DEFAULT: torch.cuda.get_rng_state(), **get_cuda_rng_tracker().get_states()}
    return {name: state.clone() for name, state in states.items()}


def put(streams):
    """Go on from where the streams were."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.cuda.set_rng_state(streams[DEFAULT])
    get_cuda_rng_tracker().set_states({name: state for name, state in streams.items() if name != DEFAULT})
