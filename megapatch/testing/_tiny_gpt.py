"""Build a tiny real GPTModel with the real DistributedDataParallel and the real optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, Literal

import torch

from ._model import TinyGPT, global_name, set_weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def tiny_gpt(
    *,
    layers: int = 2,
    hidden: int = 16,
    heads: int = 2,
    vocab: int = 32,
    seq: int = 8,
    experts: int | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    optimizer: Literal["sgd", "adam"] = "sgd",
    lr: float = 0.5,
    clip_grad: float = 1e9,
    loss_scale: float = 2.0**8,
    per_token_loss: bool = False,
    overlap_grad_reduce: bool = False,
    overlap_param_gather: bool = False,
    use_distributed_optimizer: bool = False,
    align_grad_reduce: bool = True,
    align_param_gather: bool = False,
    tied_embeddings: bool = False,
    attention: bool = True,
    frozen: Sequence[str] = (),
    hooks: bool = True,
    config: Mapping[str, Any] | None = None,
    ddp: Mapping[str, Any] | None = None,
    optim: Mapping[str, Any] | None = None,
) -> TinyGPT:
    """Build a GPTModel (local spec) in DistributedDataParallel, with its optimizer, on this rank.

    Call `init_parallel` first. All layouts have the same weights for the same sizes. With the usual epsilon Adam
    hides a wrong scale of the gradient; with ``optim={"adam_eps": 1.0}`` it is nearly SGD.

    Args:
        layers: transformer layers; a multiple of the number of pipeline stages, virtual ones included.
        hidden: hidden size.
        heads: attention heads; a multiple of the tensor parallel size.
        vocab: size of the vocabulary; a multiple of the tensor parallel size.
        seq: tokens of a sample.
        experts: experts of a MoE layer, a multiple of the expert parallel size; None: no MoE.
        dtype: of parameters and activations.
        optimizer: "sgd" without momentum or "adam", the only one that the distributed optimizer takes.
        lr: learning rate.
        clip_grad: largest gradient norm; the default clips nothing, but makes the optimizer compute the norm.
        loss_scale: initial dynamic loss scale of fp16.
        per_token_loss: set calculate_per_token_loss: divide by tokens instead of microbatches.
        overlap_grad_reduce: DistributedDataParallel reduces gradients during backward.
        overlap_param_gather: the distributed optimizer's parameters are gathered during forward.
        use_distributed_optimizer: use the distributed optimizer.
        align_grad_reduce: pipeline stages reduce together; matters only with overlap. Megatron's default is True,
            and False without virtual pipeline stages.
        align_param_gather: pipeline stages gather together; likewise.
        tied_embeddings: the output layer uses the weights of the embedding, on another stage in a pipeline.
        attention: layers have self-attention. Without it tokens do not see each other, as context
            parallelism needs here.
        frozen: patterns, as of ``fnmatch``, of global names of parameters that are not trained.
        hooks: set the model config's hooks as Megatron's train() does; train() itself wants them unset.
        config: more fields of TransformerConfig.
        ddp: more fields of DistributedDataParallelConfig.
        optim: more fields of OptimizerConfig.

    Returns:
        The model, one chunk per virtual pipeline stage, with its optimizer and configs.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    _work_without_transformer_engine()
    precision = {"bf16": dtype == "bf16", "fp16": dtype == "fp16", "params_dtype": DTYPES[dtype]}
    model_fields = {
        **_sizes(layers, hidden, heads, experts),
        **_layout(DTYPES[dtype]),
        **_plain_cpu(),
        **precision,
        "calculate_per_token_loss": per_token_loss,
    }
    ddp_fields = {
        "grad_reduce_in_fp32": dtype != "fp32",
        "overlap_grad_reduce": overlap_grad_reduce,
        "overlap_param_gather": overlap_param_gather,
        "align_param_gather": align_param_gather,
        "use_distributed_optimizer": use_distributed_optimizer,
        "bucket_size": 1000 if overlap_grad_reduce else None,  # elements: small enough for several buckets
    }
    optimizer_fields = {
        "optimizer": optimizer,
        "lr": lr,
        "min_lr": 0.0,
        "weight_decay": 0.0,
        "sgd_momentum": 0.0,
        "clip_grad": clip_grad,
        "initial_loss_scale": loss_scale,
        "min_loss_scale": 1.0,
        "loss_scale_window": 1000,
        "hysteresis": 1,
        "use_distributed_optimizer": use_distributed_optimizer,
        **_accepted(OptimizerConfig, overlap_param_gather=overlap_param_gather),
        **precision,
    }
    model_config = TransformerConfig(**{**model_fields, **(config or {})})
    ddp_config = DistributedDataParallelConfig(**{**ddp_fields, **(ddp or {})})
    optimizer_config = OptimizerConfig(**{**optimizer_fields, **(optim or {})})

    models = _models(model_config, vocab, seq, tied_embeddings, attention)
    _freeze(models, frozen)
    if dtype != "fp32":
        models = [Float16Module(model_config, model) for model in models]
    chunks = [
        DistributedDataParallel(model_config, ddp_config, model, disable_bucketing=index > 0)
        for index, model in enumerate(models)
    ]
    for chunk in chunks:
        chunk.broadcast_params()
    built = TinyGPT(
        chunks=chunks,
        optimizer=get_megatron_optimizer(optimizer_config, chunks),
        config=model_config,
        ddp_config=ddp_config,
        vocab=vocab,
        seq=seq,
        align_grad_reduce=align_grad_reduce,
        align_param_gather=align_param_gather,
    )
    if hooks:
        built.set_hooks()
    return built


def _models(config: Any, vocab: int, seq: int, tied_embeddings: bool, attention: bool) -> list[Any]:
    """Build this rank's GPTModels: one, or one per virtual pipeline stage."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    stage, stages = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    virtual_stages = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    if not attention:
        _leave_out_attention(layer.submodules)
    models = []
    for virtual_stage in range(virtual_stages or 1):
        extra = {}
        if config.mtp_num_layers:
            extra["mtp_block_spec"] = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
        if virtual_stages:
            parallel_state.set_virtual_pipeline_model_parallel_rank(virtual_stage)  # for versions without vp_stage
            extra = _accepted(GPTModel.__init__, vp_stage=virtual_stage)
        model = GPTModel(
            config,
            layer,
            vocab,
            seq,
            pre_process=stage == 0 and virtual_stage == 0,
            post_process=stage == stages - 1 and virtual_stage == (virtual_stages or 1) - 1,
            share_embeddings_and_output_weights=tied_embeddings,
            position_embedding_type="rope",
            **extra,
        )
        set_weights(model)
        models.append(model.cuda())
    return models


def _leave_out_attention(layer: Any) -> None:
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

    layer.input_layernorm = layer.self_attention = IdentityOp
    layer.self_attn_bda = IdentityFuncOp


def _freeze(models: list[Any], patterns: Sequence[str]) -> None:
    for model in models:
        for name, parameter in model.named_parameters():
            if any(fnmatch(global_name(model, name), pattern) for pattern in patterns):
                parameter.requires_grad_(False)


def _sizes(layers: int, hidden: int, heads: int, experts: int | None) -> dict[str, Any]:
    sizes: dict[str, Any] = dict(num_layers=layers, hidden_size=hidden, num_attention_heads=heads)
    if experts:
        sizes.update(
            num_moe_experts=experts,
            moe_router_topk=1,
            moe_router_pre_softmax=True,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="alltoall",
            add_bias_linear=False,
        )
    return sizes


def _layout(dtype: torch.dtype) -> dict[str, Any]:
    from megatron.core import parallel_state

    pp = parallel_state.get_pipeline_model_parallel_world_size()
    vpp = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    layout: dict[str, Any] = dict(
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        pipeline_dtype=dtype,
    )
    if vpp:
        # Over gloo, two stages confuse batched messages to each other (the loss is nan).
        layout.update(microbatch_group_size_per_vp_stage=pp, overlap_p2p_comm=True, batch_p2p_comm=False)
    return layout


def _plain_cpu() -> dict[str, Any]:
    fusions = ("bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion", "gradient_accumulation_fusion")
    return dict(
        dict.fromkeys(fusions, False), use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0
    )


def _accepted(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Return the arguments that the function takes in this version."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def _work_without_transformer_engine() -> None:
    """Define two names that some versions use although Transformer Engine, which has them, is missing."""
    from megatron.core import fp8_utils
    from megatron.core.transformer.moe import moe_utils

    if not getattr(fp8_utils, "HAVE_TE", False):
        # megatron-core 0.12 calls it for every distributed optimizer, with nothing to do, and it raises.
        fp8_utils._quantize_param_shard_impl = lambda model_params, *args, **kwargs: None
    vars(moe_utils).setdefault("te_general_gemm", None)  # megatron-core 0.16 compares it with None
