"""The engine's process: weight syncs of a real vLLM, with requests in flight. It records, and judges nothing."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

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


class Interrupted(Exception):
    """The sync that is to fail half way."""


def main(folder: str) -> None:
    """Write ``found.json`` to the folder."""
    (Path(folder) / "found.json").write_text(json.dumps(asyncio.run(_found(Path(folder)))))


async def _found(folder: Path) -> dict[str, Any]:
    """Return what the judge asks for, or under "cannot" why no engine starts here."""
    import vllm

    old, new, half = (_checkpoint(folder / name, name) for name in ("old", "new", "half"))
    try:
        engine = _engine(new)  # so that what it answers now has to do with no sync
        expected = await _answers(engine, "new")
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        return {"cannot": f"the engine of vLLM {vllm.__version__} does not start: {why}"}
    found: dict[str, Any] = {"vllm": vllm.__version__, "new": expected, "syncs": []}
    try:
        for mode in ("abort", "keep"):
            async with paused_generation(engine):
                await _load(engine, old)
            found["old"] = await _answers(engine, f"{mode}-before")
            for weights, fails in ((half, True), (new, False)):
                sync = await _sync(engine, mode, weights, fails=fails)
                found["syncs"].append(sync)
                if None in (*sync["in_flight"], *sync["answers"]):
                    return found  # the others would only wait
        return found
    finally:
        engine.shutdown()


async def _sync(engine: Any, mode: str, weights: Path, *, fails: bool) -> dict[str, Any]:
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
        async with paused_generation(engine, pause=partial(engine.pause_generation, mode=mode)) as found["paused"]:
            await asyncio.sleep(SETTLED)
            found["at_pause"] = list(map(len, made))
            await _load(engine, weights)
            await asyncio.sleep(SETTLED)
            found["after_load"] = list(map(len, made))
            if fails:
                raise Interrupted
    except Exception as error:
        found["raised"] = type(error).__name__
    found["in_flight"] = await asyncio.gather(*requests)
    found["answers"] = await _answers(engine, f"{name}-after")
    return found


async def _load(engine: Any, weights: Path) -> None:
    await engine.collective_rpc("reload_weights", kwargs={"weights_path": str(weights)})


async def _answers(engine: Any, name: str) -> list[Any]:
    """Ask one after the other: each answer is computed in the same shapes whenever it is asked for."""
    found: list[Any] = []
    for number, prompt in enumerate(PROMPTS):
        answer = await _answer(engine, f"{name}-{number}", prompt, ANSWER, [])
        found.append(answer and answer[0])
        if answer is None:
            break
    return found


async def _answer(engine: Any, name: str, prompt: list[int], length: int, made: list[int]) -> Any:
    """Return the greedy tokens and why they end, or None if the answer does not come. `made` has those so far."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)

    async def listen() -> str:
        reason = ""
        async for output in engine.generate({"prompt_token_ids": prompt}, greedy, name):
            made[:] = output.outputs[0].token_ids
            reason = str(output.outputs[0].finish_reason)
        return reason

    try:
        return made, await asyncio.wait_for(listen(), SECONDS)
    except asyncio.TimeoutError:
        return None


def _engine(weights: Path) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
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
