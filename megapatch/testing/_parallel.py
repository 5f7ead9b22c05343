"""Set up and take down model-parallel layouts, as often as a test needs."""

from __future__ import annotations


def init_parallel(
    tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1, cp: int = 1, seed: int = 123
) -> None:
    """Split the world into model-parallel groups, and seed Megatron's random state.

    The remaining dimension is data parallel. An existing layout is taken down first.

    Args:
        tp: tensor parallel size, in ranks.
        pp: pipeline parallel size, in ranks.
        vpp: virtual pipeline stages per rank; None: no virtual stages.
        ep: expert parallel size, in ranks.
        cp: context parallel size, in ranks. This makes the groups, but `tiny_gpt` cannot use them: its attention
            on CPU takes whole sequences.
        seed: of Megatron's random state.

    Raises:
        RuntimeError: as Megatron raises it, the sizes do not fit the number of ranks.
        AssertionError: likewise.
    """
    from megatron.core import parallel_state, tensor_parallel

    destroy_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def destroy_parallel() -> None:
    """Take down the layout, so that `init_parallel` can set up another in the same processes."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        # megatron-core 0.12 leaves these, and a stage without position embeddings then looks for its old group.
        parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None
