"""Model-parallel layouts: set up and taken down, as often as a test likes."""

from __future__ import annotations


def init_parallel(
    tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1, cp: int = 1, seed: int = 123
) -> None:
    """Cut the world into tensor, pipeline, virtual pipeline, expert and context parallel groups; what is left
    is data parallel. A layout that is there already is taken down first. Seeds Megatron's random state.
    (With `cp` there are the groups, but `tiny_gpt` cannot use them: its attention on CPU takes whole sequences.)

    Raises what Megatron raises for sizes that do not fit the number of ranks (RuntimeError or AssertionError).
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
    """Take down the layout, so that `init_parallel` can set up another one in the same processes."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        # 0.12 leaves these, and a stage without position embeddings then looks for the group that it had.
        parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None
