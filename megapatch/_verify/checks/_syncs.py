"""The engine's process: weight syncs of a real engine, with requests in flight. It records, no more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ...weight_sync import paused_generation

WIDTH, VOCABULARY, LAYERS = 128, 256, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
PROMPTS = [[(7 * number + place) % VOCABULARY for place in range(160)] for number in range(3)]
"""Longer than a block of the key-value cache: a block that a sync left in it would show."""
ANSWER, LONG = 16, 512
"""Tokens of an answer, and of one that is in flight during a sync."""
SECONDS = 30.0
"""In which an answer has to come. They take about one."""
SETTLED = 0.3
"""Seconds in which tokens that were made before a pause reach us."""
RECORD, STARTED = "found.json", "started"
"""Files in the folder: what was found, and a sign that the engine has answered a request."""


class Interrupted(Exception):
    """The sync that is to fail half way."""


class Engine(Protocol):
    """An inference engine, as `VLLM` and `SGLang` wrap it.

    It starts with the weights of a folder, and runs in the event loop that is running then.
    """

    MODES: tuple[str, ...]
    """Ways to pause: "abort" ends the requests in flight; after the others they continue."""

    def __init__(self, weights: Path) -> None: ...

    def generate(self, prompt: list[int], length: int, name: str) -> AsyncIterator[tuple[list[int], str]]:
        """Decode greedily, exactly `length` tokens; yield all tokens so far, and why they ended, or ""."""

    async def forget(self) -> None:
        """Empty the key-value cache."""

    async def pause(self, mode: str) -> None: ...

    async def resume(self) -> None: ...

    async def load(self, weights: Path) -> None: ...

    def shutdown(self) -> None: ...


class VLLM:
    """vLLM's AsyncLLM, which pauses by `pause_generation` and loads by `reload_weights`."""

    MODES: tuple[str, ...] = ("abort", "keep")

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


class SGLang:
    """SGLang's Engine, whose tokenizer manager pauses, and loads from a folder.

    Attention and sampling are torch's, on GPUs too: nothing is compiled.
    """

    MODES: tuple[str, ...] = ("abort", "retract")

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


ENGINES: dict[str, type[Engine]] = {"vllm": VLLM, "sglang": SGLang}


def main(folder: str, package: str) -> None:
    """Make the syncs with the engine of a package, and write the record to the folder."""
    found = asyncio.run(_found(Path(folder), ENGINES[package]))
    (Path(folder) / RECORD).write_text(json.dumps(found))


async def _found(folder: Path, new_engine: type[Engine]) -> dict[str, Any]:
    """Return the facts that are asserted later."""
    old, new, half = (_checkpoint(folder / name, name) for name in ("old", "new", "half"))
    engine = new_engine(new)  # so that what it answers now has to do with no sync
    try:
        found: dict[str, Any] = {"new": await _answers(engine, "new"), "syncs": []}
        await engine.forget()  # or what a sync ought to have emptied would be right again after the next one
        (folder / STARTED).touch()
        for mode in engine.MODES:
            async with _paused(engine, mode):
                await engine.load(old)
            found["old"] = await _answers(engine, f"{mode}-before")
            for weights, fails in ((half, True), (new, False)):
                sync = await _sync(engine, mode, weights, fails=fails)
                found["syncs"].append(sync)
                if None in (*sync["in_flight"], *sync["answers"]):
                    return found  # the others would only wait
        return found
    finally:
        engine.shutdown()


async def _sync(engine: Engine, mode: str, weights: Path, *, fails: bool) -> dict[str, Any]:
    """Make a sync while requests are in flight, with the engine's own way to pause."""
    name = f"{mode}-{fails}"
    made: list[list[int]] = [[] for _ in PROMPTS]
    requests = [
        asyncio.create_task(_answer(engine, f"{name}-{number}", prompt[::-1], LONG, made[number]))
        for number, prompt in enumerate(PROMPTS)
    ]
    deadline = time.monotonic() + SECONDS
    while not all(made) and time.monotonic() < deadline:
        await asyncio.sleep(0.001)
    found: dict[str, Any] = {"mode": mode, "fails": fails, "raised": ""}
    try:
        async with _paused(engine, mode) as found["paused"]:
            await asyncio.sleep(SETTLED)
            found["at_pause"] = list(map(len, made))
            await engine.load(weights)
            await asyncio.sleep(SETTLED)
            found["after_load"] = list(map(len, made))
            if fails:
                raise Interrupted
    except Exception as error:
        found["raised"] = type(error).__name__
    found["in_flight"] = await asyncio.gather(*requests)
    found["answers"] = await _answers(engine, f"{name}-after")
    return found


def _paused(engine: Engine, mode: str) -> paused_generation:
    return paused_generation(engine, pause=partial(engine.pause, mode), resume=engine.resume)


async def _answers(engine: Engine, name: str) -> list[Any]:
    """Ask one after the other: each answer is computed in the same shapes whenever it is asked for."""
    found: list[Any] = []
    for number, prompt in enumerate(PROMPTS):
        answer = await _answer(engine, f"{name}-{number}", prompt, ANSWER, [])
        found.append(answer and answer[0])
        if answer is None:
            break
    return found


async def _answer(engine: Engine, name: str, prompt: list[int], length: int, made: list[int]) -> Any:
    """Return the greedy tokens and why they end, or None if the answer does not come. `made` has those so far."""

    async def listen() -> str:
        reason = ""
        async for made[:], reason in engine.generate(prompt, length, name):  # noqa: B007
            pass
        return reason

    with contextlib.suppress(asyncio.TimeoutError):
        return made, await asyncio.wait_for(listen(), SECONDS)
    return None


def _checkpoint(folder: Path, name: str) -> Path:
    """Write random weights, as Hugging Face has them; of "half" only the first layer, of those of "new"."""
    import torch
    from safetensors.torch import save_file

    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCABULARY, WIDTH),
        "lm_head": (VOCABULARY, WIDTH),
    }
    norms = ["model.norm"]
    for layer in (f"model.layers.{number}" for number in range(LAYERS)):
        parts = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", *(f"self_attn.{part}_proj" for part in "qkvo")]
        shapes |= {f"{layer}.{part}": (WIDTH, WIDTH) for part in parts}
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
    generator = torch.Generator().manual_seed(1 if name == "old" else 2)
    weights = {key: torch.randn(shape, generator=generator) / WIDTH**0.5 for key, shape in shapes.items()}
    weights["model.embed_tokens"] *= WIDTH**0.5
    weights |= {key: torch.ones(WIDTH) for key in norms}
    if name == "half":
        weights = {key: value for key, value in weights.items() if "layers.0." in key}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tensors = {f"{key}.weight": value.bfloat16() for key, value in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
