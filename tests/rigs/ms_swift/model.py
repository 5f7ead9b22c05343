"""Stand-ins for ms-swift's arguments and for a model of Hugging Face's, with LoRA."""

import importlib
from types import SimpleNamespace

import torch

LORA = "mcore_bridge.tuners.lora"
LENGTH, MICROBATCHES = 8, 2
TARGETS = "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"
OFF = """
    padding_free tp_comm_overlap check_model async_save use_persistent_ckpt_worker is_multimodal
    nccl_comm_warmup overlap_param_gather_with_optimizer_step overlap_grad_reduce overlap_param_gather
    align_grad_reduce align_param_gather use_megatron_fsdp vllm_enable_lora apply_wd_to_qk_layernorm
    offload_bridge
"""
NONE = """
    metric_for_best_model virtual_pipeline_model_parallel_size lr_decay_iters lr_wsd_decay_iters
    lr_warmup_fraction vit_lr aligner_lr muon_lr
"""


def arguments(tuner, dtype, more):
    precision = {"fp16": dtype == "fp16", "bf16": dtype == "bf16"}
    params = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    values = dict(
        tuner_type=tuner,
        rlhf_type="grpo",
        router_replay_mode="disabled",
        new_special_tokens=[],
        task_type="causal_lm",
        finetune=True,
        callbacks=[],
        data_parallel_random_init=True,
        accumulate_allreduce_grads_in_fp32=True,
        bucket_size=1000,
        use_distributed_optimizer=True,
        optimizer="adam",
        params_dtype=params,
        lr=0.1,
        min_lr=0.1,
        weight_decay=0.0,
        clip_grad=1e9,
        adam_eps=1e-8,
        lr_wsd_decay_style="exponential",
        lr_warmup_iters=0,
        lr_warmup_init=0.0,
        lr_decay_style="constant",
        start_weight_decay=0.0,
        end_weight_decay=0.0,
        weight_decay_incr_style="constant",
        train_iters=100,
        num_microbatches=MICROBATCHES,
        micro_batch_size=1,
        global_batch_size=4,
        seq_length=LENGTH,
        sleep_level=0,
        context_parallel_size=1,
    )
    models = "mcore_model", "mcore_adapter", "mcore_ref_model", "mcore_ref_adapter"
    none = dict.fromkeys((*models, *NONE.split()))
    return SimpleNamespace(**{**none, **dict.fromkeys(OFF.split(), False), **values, **precision, **more})


# ------------------------------------------------------------------------------------------ LoRA
def add_lora(model):
    """Put mcore-bridge's own LoRA layers around the linear layers, and train nothing else.

    ms-swift's prepare_mcore_model() does this by peft.
    """
    lora = importlib.import_module(LORA)
    _without_transformer_engine(lora)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for layer in model.decoder.layers:
        for parent in (layer.self_attention, layer.mlp):
            for name in TARGETS:
                if hasattr(parent, name):
                    wrapped = lora.LoraParallelLinear(getattr(parent, name), "default", r=2, lora_alpha=2)
                    for part in (wrapped.lora_A["default"].weight, wrapped.lora_B["default"].weight):
                        part.data.copy_(torch.randn(part.shape, generator=generator) * 0.1)
                    setattr(parent, name, wrapped)


def _without_transformer_engine(lora):
    """Give the module Megatron's own layers, and torch's, in place of those that take Transformer Engine."""
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")

    class Linear(torch.nn.Linear):
        def __init__(self, input_size, output_size, bias, **ignored):
            super().__init__(input_size, output_size, bias=bias)

        def forward(self, x):
            return super().forward(x), None

    absent = type("Absent", (), {})
    names = [name for name in vars(lora) if name.startswith("TE")]
    vars(lora).update(dict.fromkeys(names, absent))
    lora.TELinear, lora.TEColumnParallelLinear = Linear, layers.ColumnParallelLinear
    lora.TERowParallelLinear = layers.RowParallelLinear
