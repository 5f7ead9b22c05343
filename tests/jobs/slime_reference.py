"""A Megatron checkpoint of random weights, as slime's tools/convert_hf_to_torch_dist.py leaves one."""

import importlib

import torch.distributed
from megatron.core.enums import ModelType
from megatron.training.checkpointing import save_checkpoint
from megatron.training.initialize import initialize_megatron
from megatron.training.training import get_model
from pretrain_gpt import model_provider

if __name__ == "__main__":
    importlib.import_module("megatron.training.initialize")._compile_dependencies = lambda: None
    initialize_megatron()
    save_checkpoint(1, get_model(model_provider, ModelType.encoder_or_decoder, wrap_with_ddp=False), None, None, 0)
    torch.distributed.destroy_process_group()
