"""SGLang, as the syncs ask it: its Engine, whose tokenizer manager pauses, and loads from a folder."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ._syncs import CONFIG, PROMPTS


class Engine:
    """See `_syncs.Engine`. Attention and sampling are torch's, on GPUs too: nothing is compiled."""

    MODES = ("abort", "retract")

    def __init__(self, weights: Path) -> None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # SGLang asks for it when it is imported
        from sglang.srt.entrypoints import engine
        from sglang.srt.managers import io_struct

        self._messages: Any = io_struct
        self._engine: Any = engine.Engine(
            model_path=str(weights),
            device=device,
            skip_tokenizer_init=True,
            attention_backend="torch_native",
            sampling_backend="pytorch",
            disable_cuda_graph=True,
            context_length=CONFIG["max_position_embeddings"],
            max_running_requests=2 * len(PROMPTS),
            max_total_tokens=8192,
            log_level="error",
        )
        self._manager: Any = self._engine.tokenizer_manager

    async def generate(self, prompt: list[int], length: int, name: str) -> AsyncIterator[tuple[list[int], str]]:
        greedy = {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True}
        outputs = await self._engine.async_generate(
            input_ids=prompt, sampling_params=greedy, stream=True, rid=name
        )
        async for output in outputs:
            ended = output["meta_info"]["finish_reason"] or {"type": ""}
            yield list(output["output_ids"]), ended["type"]

    async def forget(self) -> None:
        await self._manager.flush_cache()

    async def pause(self, mode: str) -> None:
        await self._manager.pause_generation(self._messages.PauseGenerationReqInput(mode=mode))

    async def resume(self) -> None:
        await self._manager.continue_generation(self._messages.ContinueGenerationReqInput())

    async def load(self, weights: Path) -> None:
        update = self._messages.UpdateWeightFromDiskReqInput(model_path=str(weights))
        loaded, message, _ = await self._manager.update_weights_from_disk(update)
        if not loaded:
            raise RuntimeError(message)

    def shutdown(self) -> None:
        self._engine.shutdown()
