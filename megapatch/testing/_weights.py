"""The same model in every layout: parameters' names and values do not depend on how the model is divided."""

from __future__ import annotations

import re
import zlib
from typing import Any

import torch


def global_name(model: Any, name: str) -> str:
    """Return a parameter's name in the whole model.

    Args:
        model: a GPTModel that is one pipeline chunk, and may hold only some of the experts.
        name: the parameter's name there.
    """
    from megatron.core import parallel_state

    def layer(match: re.Match[str]) -> str:
        return f"decoder.layers.{model.decoder.layers[int(match[1])].layer_number - 1}."

    def expert(match: re.Match[str]) -> str:
        here = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        return f"local_experts.{int(match[1]) + here * parallel_state.get_expert_model_parallel_rank()}."

    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    name = re.sub(r"decoder\.layers\.(\d+)\.", layer, name)
    return re.sub(r"local_experts\.(\d+)\.", expert, name)


def set_weights(model: Any) -> None:
    """Fill a GPTModel's parameters with values that depend only on their global names.

    A tensor-parallel shard gets its part of the whole parameter's values.
    """
    from megatron.core import parallel_state

    of_layers = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    of_experts = (
        parallel_state.get_expert_tensor_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_rank(),
    )
    for name, parameter in model.named_parameters():
        tp, tp_rank = of_experts if "local_experts" in name else of_layers
        sharded = tp > 1 and getattr(parameter, "tensor_model_parallel", False)
        shape = list(parameter.shape)
        if sharded:
            shape[parameter.partition_dim] *= tp
        generator = torch.Generator().manual_seed(zlib.crc32(global_name(model, name).encode()))
        whole = torch.randn(shape, generator=generator) * 0.2
        if "norm" in name and name.endswith("weight"):
            whole += 1.0
        parameter.data.copy_(whole.chunk(tp, parameter.partition_dim)[tp_rank] if sharded else whole)
