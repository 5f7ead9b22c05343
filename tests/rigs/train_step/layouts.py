"""The grid of layouts: every way of dividing and training a model that Megatron has on CPU.

A case is (number of ranks, layout, options, loss): arguments of `init_parallel`, of `model_of`, and of
`TinyGPT.train_step`.
"""

from __future__ import annotations

import dataclasses

from megapatch.testing import init_parallel, tiny_gpt
from rigs.megatron.options import ADAM, BOTH, GRADS

from .layer_wise import GATHERS_AHEAD, layer_wise
from .models import MEAN, MOE, MTP

TOKENS = {"masked": True}  # (sum, tokens, metrics), with another number of tokens in each
SHARDED = {**ADAM, "use_distributed_optimizer": True}
FP16 = {"dtype": "fp16", "loss_scale": 2.0**12}
BF16_BUFFERS = {"dtype": "bf16", "ddp": {"grad_reduce_in_fp32": False}}
PER_TOKEN = {"per_token_loss": True}
SEQUENCE = {"config": {"sequence_parallel": True}}
MOE_SEQUENCE = {**MOE, "config": {**MOE["config"], **SEQUENCE["config"]}}
# The usual dispatcher gathers parts of unequal size over experts' tensor parallelism, which gloo refuses.
GATHERED_TOKENS = {**MOE, "config": {**MOE_SEQUENCE["config"], "moe_token_dispatcher_type": "allgather"}}
NO_ATTENTION = {"attention": False}
TWO_INSTANCES = {"optimizer_instances": 2}
INSTANCES = {**SHARDED, **GRADS, "ddp": {"num_distributed_optimizer_instances": 2}}

CASES = {
    "dp2, mean": (2, {}, {}, MEAN),
    "dp2, each microbatch by its tokens": (2, {}, {}, TOKENS),
    "dp2, tokens": (2, {}, PER_TOKEN, TOKENS),
    "dp2, overlap": (2, {}, GRADS, TOKENS),
    "dp2, overlap, one bucket": (2, {}, {**GRADS, "ddp": {"bucket_size": None}}, MEAN),
    "dp2, overlap, three buckets": (2, {}, {**GRADS, "ddp": {"bucket_size": None, "num_buckets": 3}}, MEAN),
    "dp2, overlap, gradients checked": (
        2,
        {},
        {**GRADS, "ddp": {"check_for_nan_in_grad": True, "check_for_large_grads": True}},
        MEAN,
    ),
    "dp2, tokens, overlap": (2, {}, {**GRADS, **PER_TOKEN}, TOKENS),
    "dp2, averaged in the collective": (2, {}, {**GRADS, "ddp": {"average_in_collective": True}}, MEAN),
    "dp2, distributed optimizer": (2, {}, SHARDED, MEAN),
    "dp2, distributed optimizer, overlap": (2, {}, {**SHARDED, **GRADS}, TOKENS),
    "dp2, distributed optimizer, both": (2, {}, BOTH, TOKENS),
    "dp2, distributed optimizer, both, tokens": (2, {}, {**BOTH, **PER_TOKEN}, TOKENS),
    "dp2, distributed optimizer, both, padded": (
        2,
        {},
        {**BOTH, "ddp": {"pad_buckets_for_high_nccl_busbw": True}},
        MEAN,
    ),
    "dp2, bf16": (2, {}, {"dtype": "bf16", **GRADS}, MEAN),
    "dp2, bf16 buffers": (2, {}, {**BF16_BUFFERS, **GRADS}, MEAN),
    "dp2, bf16 buffers, reduced in fp32": (
        2,
        {},
        {**SHARDED, **BF16_BUFFERS, "ddp": {**BF16_BUFFERS["ddp"], "reduce_scatter_with_fp32_accumulation": True}},
        MEAN,
    ),
    "dp2, bf16 buffers, some accumulated in fp32": (
        2,
        {},
        {
            **SHARDED,
            **BF16_BUFFERS,
            "ddp": {**BF16_BUFFERS["ddp"], "param_name_patterns_for_fp32_local_accumulation": ("*fc*",)},
        },
        MEAN,
    ),
    "dp2, fp16": (2, {}, {**FP16, **GRADS}, MEAN),
    "dp2, fp16, tokens": (2, {}, {**FP16, **PER_TOKEN}, TOKENS),
    "dp2, multi-token prediction": (2, {}, {**MTP, **GRADS}, MEAN),
    "dp2, multi-token prediction, tokens": (2, {}, {**MTP, **PER_TOKEN}, TOKENS),
    "dp2, indexer's loss": (2, {}, {**GRADS, "indexer_loss": True}, MEAN),
    "dp2, indexer's loss, tokens": (2, {}, {**PER_TOKEN, "indexer_loss": True}, TOKENS),
    "dp2, frozen": (2, {}, {**GRADS, "frozen": ("embedding.*", "decoder.layers.0.*", "*bias")}, MEAN),
    "dp2, frozen, tokens": (2, {}, {**BOTH, **PER_TOKEN, "frozen": ("*fc1*",)}, TOKENS),
    "dp2, groups with their own learning rates": (2, {}, {**GRADS, "learning_rates": (0.5, 0.1)}, MEAN),
    "dp2, layer-wise": (2, {}, {"layer_wise": True}, MEAN),
    "dp2, layer-wise, tokens": (2, {}, {"layer_wise": True, **PER_TOKEN}, TOKENS),
    "dp2, hooks of the user's": (2, {}, {**GRADS, "own_hooks": True}, MEAN),
    "pp2": (2, {"pp": 2}, {}, MEAN),
    "pp2, tokens": (2, {"pp": 2}, {**GRADS, **PER_TOKEN}, TOKENS),
    "pp2, tied embeddings": (2, {"pp": 2}, {"tied_embeddings": True}, MEAN),
    "pp2, frozen embedding": (2, {"pp": 2}, {**GRADS, "frozen": ("embedding.*",)}, MEAN),
    "tp2": (2, {"tp": 2}, GRADS, TOKENS),
    "tp2, sequence parallel": (2, {"tp": 2}, SEQUENCE, MEAN),
    "cp2": (2, {"cp": 2}, {**NO_ATTENTION, **GRADS}, MEAN),
    "cp2, tokens": (2, {"cp": 2}, {**NO_ATTENTION, **PER_TOKEN}, TOKENS),
    "ep2": (2, {"ep": 2}, MOE, MEAN),
    "ep2, tokens": (2, {"ep": 2}, {**MOE, **PER_TOKEN}, TOKENS),
    "pp2 dp2, overlap": (4, {"pp": 2}, GRADS, TOKENS),
    "pp2 dp2, both": (4, {"pp": 2}, BOTH, MEAN),
    "pp2 dp2, layer-wise": (4, {"pp": 2}, {"layer_wise": True}, MEAN),
    "pp2 dp2, tied embeddings, both, tokens": (
        4,
        {"pp": 2},
        {**BOTH, **PER_TOKEN, "tied_embeddings": True},
        TOKENS,
    ),
    "pp2 dp2, hooks of the user's": (4, {"pp": 2}, {**GRADS, "own_hooks": True}, MEAN),
    "pp2 vpp2 dp2, overlap": (4, {"pp": 2, "vpp": 2}, GRADS, MEAN),
    "pp2 vpp2 dp2, both": (4, {"pp": 2, "vpp": 2}, BOTH, TOKENS),
    "pp2 vpp2 dp2, both, aligned": (4, {"pp": 2, "vpp": 2}, {**BOTH, "align_param_gather": True}, TOKENS),
    "tp2 pp2, tokens": (4, {"tp": 2, "pp": 2}, PER_TOKEN, TOKENS),
    "tp2 ep2": (4, {"tp": 2, "ep": 2}, {**GATHERED_TOKENS, **GRADS}, MEAN),
    "tp2 ep2, whole experts": (4, {"tp": 2, "ep": 2, "expert_tp": 1}, {**MOE_SEQUENCE, **GRADS}, MEAN),
    "cp2 dp2, both": (4, {"cp": 2}, {**NO_ATTENTION, **BOTH}, MEAN),
    "cp2 dp2, both, tokens": (4, {"cp": 2}, {**NO_ATTENTION, **BOTH, **PER_TOKEN}, TOKENS),
    "dp4, two optimizer instances": (4, TWO_INSTANCES, INSTANCES, TOKENS),
    "dp4, two optimizer instances, tokens": (4, TWO_INSTANCES, {**INSTANCES, **PER_TOKEN}, TOKENS),
    "dp4, two optimizer instances, both": (4, TWO_INSTANCES, {**INSTANCES, "overlap_param_gather": True}, MEAN),
    "ep2 dp2, overlap": (4, {"ep": 2}, {**MOE, **GRADS}, MEAN),
    "ep2 dp2, both, tokens": (4, {"ep": 2}, {**MOE, **BOTH, **PER_TOKEN}, TOKENS),
}

NOT_KNOWN_HERE = "this Megatron's configs lack a field that the case sets"
INDEXER_LOSS_SCALE = "experimental_attention_variant_loss_scale_func"


def is_known_here(options):
    """Return whether this Megatron has what a case sets."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    if options.get("indexer_loss") and not hasattr(TransformerConfig, INDEXER_LOSS_SCALE):
        return False
    if options.get("layer_wise") and not GATHERS_AHEAD:
        return False
    return set(options.get("ddp", ())) <= {
        field.name for field in dataclasses.fields(DistributedDataParallelConfig)
    }


def in_layouts(cases, world_size, chosen=None):
    """Yield (name, layout, options, ...) of the cases of this many ranks, with each layout set up only once.

    Process groups are slow to make, and some of their threads stay: about three a layout. Cases that this Megatron
    does not know are left out.
    """
    here = {name: case for name, case in cases.items() if case[0] == world_size and is_known_here(case[2])}
    if chosen is not None:
        here = {name: case for name, case in here.items() if name in chosen}
    layouts = []
    for _, layout, *_ in here.values():
        if layout not in layouts:
            layouts.append(layout)
    for current in layouts:
        init_parallel(**current)
        for name, (_, layout, *rest) in here.items():
            if layout == current:
                yield name, layout, *rest


def model_of(layout, options):
    """Build the model of a case, in a layout that is set up."""
    options = {"layers": 4 if layout.get("vpp") else 2, **options}
    learning_rates, own_hooks = options.pop("learning_rates", None), options.pop("own_hooks", False)
    indexer_loss = options.pop("indexer_loss", False)
    model = (layer_wise if options.pop("layer_wise", False) else tiny_gpt)(**options)
    if indexer_loss:
        add_indexer_loss(model)
    if learning_rates:
        for group, rate in zip(model.optimizer.param_groups, learning_rates, strict=True):
            group["lr"] = rate
    if own_hooks:
        _wrap_hooks(model.config)
    return model


def add_indexer_loss(model):
    """Give the first layer a loss of its own, by the means that DeepSeek's sparse attention has for its indexer.

    That attention itself needs a GPU.
    """
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler

    def with_loss(*args, **kwargs):
        hidden, context = forward(*args, **kwargs)
        return DSAIndexerLossAutoScaler.apply(hidden, 0.1 * weight.pow(2).sum()), context

    layer = model.chunks[0].module.decoder.layers[0]
    weight, forward, layer.forward = layer.mlp.linear_fc1.weight, layer.forward, with_loss
    setattr(model.config, INDEXER_LOSS_SCALE, DSAIndexerLossAutoScaler.set_loss_scale)


def _wrap_hooks(config):
    """Wrap the hooks as a user might, with an effect on the numbers: the gradient is halved once a step."""

    def finalize_half(chunks, *args, **kwargs):
        finalize(chunks, *args, **kwargs)
        for chunk in chunks:
            chunk.scale_gradients(0.5)

    def start(*args, **kwargs):
        return grad_sync(*args, **kwargs)

    finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, finalize_half
    grad_sync, config.grad_sync_func = config.grad_sync_func, start
