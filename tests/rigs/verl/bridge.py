"""The part of Megatron-Bridge that verl uses, which makes our tiny GPT instead of a model of Hugging Face's."""

import dataclasses
import importlib
from types import SimpleNamespace

import torch

from megapatch.testing._tiny_gpt import _models, _plain_cpu, _work_without_transformer_engine
from rigs.megatron.exporters import MODULES, new_bridge, tasks_of
from rigs.stand_ins import Anything

VOCABULARY, LAYERS, LENGTH = 64, 4, 10
SIZES = {"num_layers": LAYERS, "hidden_size": 16, "num_attention_heads": 2}


def stand_in(module, name):
    ours = {
        "AutoBridge": AutoBridge,
        "DistributedDataParallelConfig": _ddp_config,
        "create_ddp_config": _new_ddp_config,
    }
    return ours.get(name) or Anything(name, (), {})


def _ddp_config(**fields):
    """Bridge's configuration of DistributedDataParallel is Megatron's own with finalize()."""
    from megatron.core.distributed import DistributedDataParallelConfig

    config = DistributedDataParallelConfig(**fields)
    config.finalize = lambda: None
    return config


def _new_ddp_config(overrides=None, use_distributed_optimizer=True, **ignored):
    """Newer releases of verl call it in place of the former."""
    return _ddp_config(use_distributed_optimizer=use_distributed_optimizer, **(overrides or {}))


class Provider(SimpleNamespace):
    """The part of Bridge's model providers that verl uses: takes fields of TransformerConfig, makes the model."""

    def apply_overrides_and_finalize(self, dtype, overrides):
        vars(self).update(overrides, **_precision(dtype))

    def finalize(self):
        vars(self).update(_precision(self.params_dtype))

    def provide_distributed_model(self, wrap_with_ddp=True, ddp_config=None, **ignored):
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import TransformerConfig

        _work_without_transformer_engine()
        known = {field.name for field in dataclasses.fields(TransformerConfig)} - {"attention_backend"}
        config = TransformerConfig(
            **{**_plain_cpu(), **SIZES, **{name: value for name, value in vars(self).items() if name in known}}
        )
        config.share_embeddings_and_output_weights = False  # Bridge's own configurations have it
        chunks = _models(config, VOCABULARY, LENGTH, tied_embeddings=False, attention=True)
        for chunk in chunks:
            chunk.register_forward_pre_hook(_without_padding_mask, with_kwargs=True)
        chunks = [Float16Module(config, chunk) for chunk in chunks]
        if not wrap_with_ddp:
            return chunks
        chunks = [
            DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
        for chunk in chunks:
            chunk.broadcast_params()
        return chunks


def _without_padding_mask(model, args, kwargs):
    """verl's mask is True where there is a token, as Transformer Engine has it, and padding stands at the end; the
    local attention takes True as masked, and makes its own causal mask without one."""
    return args, {**kwargs, "attention_mask": None}


def _precision(dtype):
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "fp16": dtype == torch.float16,
        "bf16": dtype == torch.bfloat16,
        # Over gloo, two stages confuse batched messages to each other.
        "batch_p2p_comm": False,
    }


class AutoBridge:
    """The part of Bridge's AutoBridge that verl uses; the real one would ask Hugging Face for the model's kind."""

    @classmethod
    def from_hf_pretrained(cls, *ignored, **also_ignored):
        return cls()

    def to_megatron_provider(self, load_weights):
        return Provider()

    def load_hf_weights(self, chunks, *ignored, **also_ignored):
        """All layouts have the same weights already."""

    def get_conversion_tasks(self, chunks):
        return tasks_of(importlib.import_module(MODULES["Megatron-Bridge"]), chunks)

    def export_hf_weights(self, chunks, conversion_tasks=None):
        """Stream the model by Bridge's own exporter, as the real one does."""
        module = importlib.import_module(MODULES["Megatron-Bridge"])
        return new_bridge(module).stream_weights_megatron_to_hf(
            chunks,
            SimpleNamespace(),
            show_progress=False,
            conversion_tasks=conversion_tasks or self.get_conversion_tasks(chunks),
            merge_adapter_weights=False,
        )
