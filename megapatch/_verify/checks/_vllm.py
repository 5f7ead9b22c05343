"""vLLM, as the syncs ask it: its AsyncLLM, which pauses by `pause_generation` and loads by `reload_weights`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ._syncs import CONFIG, PROMPTS


class Engine:
    """See `_syncs.Engine`."""

    MODES = ("abort", "keep")

    def __init__(self, weights: Path) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine: Any = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(weights),
                skip_tokenizer_init=True,
                enforce_eager=True,
                max_model_len=CONFIG["max_position_embeddings"],
                max_num_seqs=2 * len(PROMPTS),
                kv_cache_memory_bytes=64 << 20,
                gpu_memory_utilization=0.05,
                disable_log_stats=True,
            )
        )

    async def generate(self, prompt: list[int], length: int, name: str) -> AsyncIterator[tuple[list[int], str]]:
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
        async for output in self._engine.generate({"prompt_token_ids": prompt}, greedy, name):
            yield list(output.outputs[0].token_ids), str(output.outputs[0].finish_reason or "")

    async def forget(self) -> None:
        await self._engine.reset_prefix_cache()

    async def pause(self, mode: str) -> None:
        await self._engine.pause_generation(mode=mode)

    async def resume(self) -> None:
        await self._engine.resume_generation()

    async def load(self, weights: Path) -> None:
        await self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(weights)})

    def shutdown(self) -> None:
        self._engine.shutdown()
