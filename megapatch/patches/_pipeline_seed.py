"""How far a pipeline stage's seed is from the first one's."""

from __future__ import annotations

STAGE = "get_pipeline_model_parallel_rank"
"""Name of megatron.core.parallel_state's function: code that reads it makes the seed depend on the stage."""
_OFFSET = 100  # for each stage, as in megatron.training.initialize._set_random_seed


def seed_offset() -> int:
    """Return what this rank's stage adds to the seed; 0 before model parallel is initialized."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0
    stage: int = parallel_state.get_pipeline_model_parallel_rank()
    return _OFFSET * stage
