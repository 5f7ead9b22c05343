"""What NeMo-RL's Megatron worker gets on a CPU: a tiny GPT in the place of one that Bridge converts.

Its __init__, its training, its log-probs and offloading are its own.
"""

import importlib
import itertools
from types import SimpleNamespace

import torch

from rigs.jobs.llama import FUSIONS

VOCABULARY, LENGTH = 64, 16
loss_calls = itertools.count(1)
"""Of this process."""


class Here(str):
    """The CPU, which also passes for the GPU of a worker's number."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other):
        return isinstance(other, int) or str.__eq__(self, other)


def stand_in(worker):
    """Replace in the worker's module what reads Hugging Face's models, or asks a GPU."""
    setup = importlib.import_module("nemo_rl.models.megatron.setup")
    here = Here("cpu")
    torch.cuda.current_device = lambda: here
    torch.cuda.is_initialized = lambda: False
    importlib.import_module("nemo_rl.distributed.numa_utils").bind_to_gpu_numa = _nothing
    vars(worker).update(
        setup_distributed=lambda: torch.distributed.init_process_group("gloo"),
        apply_transformer_engine_patch=_nothing,
        log_gpu_memory_diagnostics=_nothing,
        handle_model_import=_nothing,
        validate_model_paths=lambda config: ("tiny", "tiny", True),
        validate_and_set_config=_runtime_config,
        setup_model_and_optimizer=_model_and_optimizer,
        setup_reference_model_state=_reference,
    )
    setup.build_tokenizer = _nothing
    setup.AutoBridge = SimpleNamespace(from_hf_pretrained=_nothing)


def _nothing(*ignored, **also_ignored):
    return None


def _runtime_config(config, rank, *paths):
    of = importlib.import_module("nemo_rl.models.megatron.config")
    state = _built(config)
    known = {
        "megatron_cfg": state["state"].cfg,
        "model_cfg": SimpleNamespace(fp16=False, bf16=False),
        "dtype": torch.float32,
        "optimizer_cpu_offload": False,
        "offload_optimizer_for_logprob": True,
        "is_generation_colocated": True,
        "final_padded_vocab_size": VOCABULARY,
    }
    return of.RuntimeConfig(**{name: known.get(name) for name in of.RuntimeConfig._fields})


_state = {}


def _model_and_optimizer(*ignored, **also_ignored):
    of = importlib.import_module("nemo_rl.models.megatron.config").ModelAndOptimizerState
    return of(**{name: _state.get(name) for name in of._fields})


def _reference(*ignored, **also_ignored):
    return _state["reference"]


def _built(config):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.utils import StragglerDetector

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    overlaps = config["megatron_cfg"]["distributed_data_parallel_config"]
    transformer = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.2,
        **dict.fromkeys(FUSIONS, False),
    )
    transformer.make_vocab_size_divisible_by = 1
    gpt = GPTModel(
        config=transformer,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=2 * LENGTH,
        parallel_output=True,
    )
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        average_in_collective=False,
        check_for_nan_in_grad=True,
        bucket_size=8000,
        **overlaps,
    )
    model = DistributedDataParallel(transformer, ddp, gpt)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-3,
        weight_decay=0.01,
        clip_grad=1.0,
        use_distributed_optimizer=True,
        overlap_param_gather=overlaps["overlap_param_gather"],
        params_dtype=torch.float32,
    )
    optimizer = get_megatron_optimizer(settings, [model])
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=32,
        lr_decay_steps=320,
        lr_decay_style="linear",
        start_wd=0.01,
        end_wd=0.1,
        wd_incr_steps=32,
        wd_incr_style="linear",
    )
    whole = SimpleNamespace(
        model=transformer,
        ddp=ddp,
        optimizer=settings,
        dist=SimpleNamespace(align_grad_reduce=True),
        validate=_nothing,
    )
    global_state = SimpleNamespace(
        cfg=whole, straggler_timer=StragglerDetector(), train_state=SimpleNamespace(step=0)
    )
    _state.update(
        state=global_state,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        checkpointing_context={},
        reference={
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in model.state_dict().items()
        },
    )
    return _state
