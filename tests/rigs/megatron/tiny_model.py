"""The tiny GPT for frameworks that would make one of Hugging Face's: its configuration, and DDP around it."""

import torch

from megapatch.testing._tiny_gpt import _layout, _models, _plain_cpu, _sizes, _work_without_transformer_engine


def config_of(dtype, experts=None, **more):
    from megatron.core.transformer.transformer_config import TransformerConfig

    _work_without_transformer_engine()
    precision = {"fp16": dtype == torch.float16, "bf16": dtype == torch.bfloat16, "params_dtype": dtype}
    return TransformerConfig(
        **{**_sizes(4, 16, 2, experts), **_layout(dtype), **_plain_cpu(), **precision, **more}
    )


def models_of(config, vocabulary, length):
    """Return this rank's chunks, in half precision where the configuration says so."""
    from megatron.core.transformer.module import Float16Module

    chunks = _models(config, vocabulary, length, tied_embeddings=False, attention=True)
    return [Float16Module(config, chunk) for chunk in chunks] if config.fp16 or config.bf16 else chunks


def in_ddp(chunks, config, ddp_config):
    from megatron.core.distributed import DistributedDataParallel

    return [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
