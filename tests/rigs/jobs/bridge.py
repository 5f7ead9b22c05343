"""Megatron-Bridge where Hugging Face's packages are not installed: training takes none of its conversions.

transformers, datasets and the like get stand-ins, for Bridge and for NVRx; three packages lose their __init__,
which would import all conversions.
"""

import importlib
import sys
from importlib.util import find_spec

from rigs.stand_ins import BRIDGE, BarePackages, ForImporters

MODELS = f"{BRIDGE}.models"
ABSENT = (
    "PIL",
    "accelerate",
    "datasets",
    "defusedxml",
    "diffusers",
    "filelock",
    "flash_attn",
    "httpx",
    "huggingface_hub",
    "hydra",
    "peft",
    "pynvml",
    "requests",
    "rich",
    "safetensors",
    "setproctitle",
    "tqdm",
    "transformers",
    "wandb",
)
PROVIDERS = {"GPTModelProvider": "gpt_provider", "T5ModelProvider": "t5_provider"}


def find_bridge():
    if find_spec("transformers") is not None:
        return
    sys.meta_path.insert(0, BarePackages((BRIDGE, MODELS, f"{MODELS}.conversion")))
    sys.meta_path += [
        ForImporters((BRIDGE, "nvidia_resiliency_ext"), ABSENT),
        ForImporters(("megatron.core.inference.contexts.attention_context.triton",), ["triton"]),  # Bridge 0.3
    ]
    importlib.import_module(MODELS).__getattr__ = _provider


def _provider(name):
    """What Bridge's training takes from the package itself."""
    if name not in PROVIDERS:
        raise AttributeError(name)
    return getattr(importlib.import_module(f"{MODELS}.{PROVIDERS[name]}"), name)
