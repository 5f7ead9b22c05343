"""NeMo-RL's policy worker for Megatron around a tiny GPT: of the checkout in NEMO_RL_CHECKOUT, or our imitation.

Of a checkout NeMo-RL and the part of Megatron-Bridge that it trains with are real; what its training does not use
has stand-ins. The model, the data and the attributes that the worker's __init__ would have set are ours.
"""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rigs.imported import after_megatron
from rigs.stand_ins import BRIDGE, Anything, BarePackages, StandIns
from rigs.variables import folder_in

CHECKOUT = folder_in("NEMO_RL_CHECKOUT")
IMITATIONS = Path(__file__).parents[2] / "imitations"
needs_nemo_rl = pytest.mark.skipif(not CHECKOUT, reason="NEMO_RL_CHECKOUT is not set")
WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker"
STAND_INS = (
    f"{BRIDGE}.models",
    f"{BRIDGE}.peft",
    "PIL",
    "datasets",
    "decord",
    "fastapi",
    "hydra",
    "matplotlib",
    "megatron.energon",
    "mlflow",
    "modelopt",
    "omegaconf",
    "prometheus_client",
    "pynvml",
    "rich",
    "swanlab",
    "tensordict",
    "torch.utils.tensorboard",
    "tqdm",
    "transformers",
    "uvicorn",
    "wandb",
    "zmq",
)
SHAPES = ("checkout",) if CHECKOUT else ("release", "main")
"""The shape of a test's run: the value of NEMO_RL_SHAPE, which our imitation reads."""
VOCABULARY, LENGTH = 64, 12
# For tiny_gpt: what NeMo-RL forces, and no hooks, which its setup makes.
GPT = {
    "vocab": VOCABULARY,
    "seq": LENGTH,
    "hooks": False,
    "per_token_loss": True,
    "ddp": {"average_in_collective": False, "check_for_nan_in_grad": True},
}


def has_own_split_step(shape):
    """Return whether NeMo-RL has the step in slices itself, as main does; in releases the patch adds it."""
    return "def begin_train_step" in _worker_source() if CHECKOUT else shape == "main"


def has_refit_of_local_shards():
    return not CHECKOUT or "def nccl_reshard_refit" in _worker_source()


def find_nemo_rl(real=()):
    """Make NeMo-RL importable, with the packages in `real` not replaced by stand-ins: the setup of a rank."""
    sys.path.insert(0, CHECKOUT or str(IMITATIONS))
    if CHECKOUT:
        _stand_in(real)


if not CHECKOUT:  # whose stand-ins come before Megatron
    after_megatron(find_nemo_rl)


def _stand_in(real):
    anything = StandIns(set(STAND_INS) - set(real), lambda module, name: Anything(name, (), {}))
    sys.meta_path[:0] = [BarePackages(), anything]
    importlib.import_module(BRIDGE).AutoBridge = Anything("AutoBridge", (), {})
    importlib.import_module("transformers").__version__ = "5.8.1"  # NeMo-RL 0.7 and later refuses 5.12
    _name_both_fsdps()


def _worker_source():
    return (Path(CHECKOUT) / f"{WORKER.replace('.', '/')}.py").read_text()


def _name_both_fsdps():
    """Define classes that NeMo-RL after 0.7 imports from Megatron for isinstance checks; no wheel has them yet."""
    names = ("FullyShardedDataParallelV1", "FullyShardedDataParallelV2")
    if names[0] in _worker_source():
        adapter = importlib.import_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
        for name in names:
            vars(adapter).setdefault(name, type(name, (), {}))


def worker_for(model, settings=None):
    """Return a worker as its __init__ leaves it, around a model made with GPT's options.

    settings   more of the policy's configuration, section by section: {"megatron_cfg": {"force_...": True}}
    """
    module = importlib.import_module(WORKER)
    worker = object.__new__(module.MegatronPolicyWorkerImpl)
    worker.cfg = _settings(model.ddp_config)
    for section, value in (settings or {}).items():
        known = worker.cfg.setdefault(section, value)
        if known is not value:
            worker.cfg[section] = {**known, **value} if isinstance(known, dict) else value
    worker.rank = torch.distributed.get_rank()
    (worker.model,), worker.optimizer = model.chunks, model.optimizer
    worker.scheduler = _scheduler(model.optimizer)
    worker.mcore_state = _state(model)
    worker.megatron_cfg = worker.mcore_state.cfg
    worker.checkpointing_context = {}
    worker.dtype = model.config.params_dtype
    worker.sampling_params = worker.draft_model = worker.fp8_cfg = None
    worker.defer_fp32_logits = worker.optimizer_cpu_offload = worker.offload_optimizer_for_logprob = False
    worker.is_generation_colocated = worker.delegate_pack_to_model = worker._router_replay_enabled = False
    worker.delegate_mtp_loss_mask_to_model = worker.model_slices_context_parallel_inputs = False  # after 0.7
    worker.media_placeholder_token_id = worker.inference_model = None
    worker.offload_optimizer_for_refit = True
    worker.reference_state_dict = {
        name: value.detach().clone() for name, value in worker.model.state_dict().items() if torch.is_tensor(value)
    }
    worker.timer = importlib.import_module("nemo_rl.utils.timer").Timer()
    _finish_setup(worker)
    return worker


def batch(step, size, rank=None):
    """Return this data-parallel rank's samples of a step (or another rank's), in NeMo-RL's own dictionary.

    The number of tokens that count differs between samples and between steps; one sample in five does not count.
    """
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank() if rank is None else rank
    found = [_sample(step, index) for index in range(rank * size, (rank + 1) * size)]
    module = importlib.import_module("nemo_rl.distributed.batched_data_dict")
    return module.BatchedDataDict({name: torch.stack([one[name] for one in found]) for name in found[0]})


def nll_loss():
    """Return NeMo-RL's own loss, by tokens."""
    return _losses().NLLLossFn()


def policy_gradient_loss(**settings):
    """Return NeMo-RL's own clipped loss, by tokens, with a penalty for leaving the reference and a correction for
    sampling (truncated token by token); by sequences with ``token_level_loss=False``."""
    values = {
        "reference_policy_kl_penalty": 0.1,
        "reference_policy_kl_type": "k3",
        "kl_input_clamp_value": 20.0,
        "kl_output_clamp_value": 10.0,
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.2,
        "ratio_clip_c": None,
        "use_on_policy_kl_approximation": True,
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "icepop",
        "truncated_importance_sampling_ratio": 1.1,
        "truncated_importance_sampling_ratio_min": 0.9,
        "token_level_loss": True,
        **settings,
    }
    config = _losses().ClippedPGLossConfig  # to 0.6 a dictionary, then pydantic's
    return _losses().ClippedPGLossFn(config(**values))


def _losses():
    return importlib.import_module("nemo_rl.algorithms.loss")


def _sample(step, index):
    generator = torch.Generator().manual_seed(10_000 * step + index)

    def logprobs(around=None, spread=0.1):
        noise = torch.randn(LENGTH, generator=generator)
        return -4.0 + 0.5 * noise if around is None else around + spread * noise

    length = LENGTH - (step + index) % 4
    positions = torch.arange(LENGTH)
    previous = logprobs()
    return {
        "input_ids": torch.randint(1, VOCABULARY, (LENGTH,), generator=generator) * (positions < length),
        "input_lengths": torch.tensor(length),
        "token_mask": ((positions >= 2 + (step + index) % 3) & (positions < length)).long(),
        "sample_mask": torch.tensor(float((step + index) % 5 != 4)),
        "advantages": torch.randn(1, generator=generator).expand(LENGTH).clone(),
        "prev_logprobs": previous,
        "generation_logprobs": logprobs(previous),
        "reference_policy_logprobs": logprobs(previous),
    }


# ---------------------------------------------------------------- what the worker's __init__ makes
def _settings(ddp):
    from megatron.core import parallel_state

    off = {"enabled": False}
    return {
        "train_global_batch_size": 4 * parallel_state.get_data_parallel_world_size(),
        "train_micro_batch_size": 2,
        "logprob_batch_size": 2,
        "max_total_sequence_length": LENGTH,
        "make_sequence_length_divisible_by": 1,
        "dynamic_batching": off,
        "sequence_packing": off,
        "megatron_cfg": {
            "empty_unused_memory_level": 1,
            "moe_per_layer_logging": False,
            "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
            "context_parallel_size": 1,
            "sequence_parallel": False,
            "optimizer": {"use_distributed_optimizer": ddp.use_distributed_optimizer},
            "distributed_data_parallel_config": {
                "overlap_grad_reduce": ddp.overlap_grad_reduce,
                "overlap_param_gather": ddp.overlap_param_gather,
            },
        },
    }


def _scheduler(optimizer):
    """Return Megatron's scheduler. No test gets past its warm-up, so that rate and decay change each step."""
    module = importlib.import_module("megatron.core.optimizer_param_scheduler")
    rate = optimizer.param_groups[0]["lr"]
    return module.OptimizerParamScheduler(
        optimizer,
        init_lr=rate / 2,
        max_lr=rate,
        min_lr=rate / 2,
        lr_warmup_steps=1000,
        lr_decay_steps=2000,
        lr_decay_style="constant",
        start_wd=0.0,
        end_wd=0.1,
        wd_incr_steps=1000,
        wd_incr_style="linear",
    )


def _state(model):
    """Return Bridge's GlobalState. Its configuration has the sections that the worker reads; the model section is
    Megatron's own config: what Bridge calls a provider is one."""
    settings = SimpleNamespace(
        model=model.config,
        ddp=model.ddp_config,
        optimizer=model.optimizer.config,
        dist=SimpleNamespace(align_grad_reduce=model.align_grad_reduce),
    )
    if not CHECKOUT:
        return SimpleNamespace(cfg=settings, straggler_timer=None)
    model.config.make_vocab_size_divisible_by = 1
    model.config.seq_length, model.config.vocab_size = model.seq, model.vocab
    settings.checkpoint = importlib.import_module(f"{BRIDGE}.training.config").CheckpointConfig(save=None)
    state = importlib.import_module(f"{BRIDGE}.training.state").GlobalState()
    state._cfg = settings  # not by its property, which would begin to handle signals
    return state


def _finish_setup(worker):
    """Call NeMo-RL's last function of a worker's setup, which makes the hooks on the model's config."""
    from megatron.core import parallel_state

    setup = importlib.import_module("nemo_rl.models.megatron.setup")
    setup.build_tokenizer = lambda *ignored, **also_ignored: None
    sizes = SimpleNamespace(get_axis_size=lambda name: parallel_state.get_data_parallel_world_size())
    _, _, worker.should_disable_forward_pre_hook, worker.dp_size = setup.finalize_megatron_setup(
        worker.cfg, worker.megatron_cfg, "", sizes, worker.model, worker.optimizer
    )
    if hasattr(worker, "_disable_forward_pre_hook_until_next_train_step"):  # from 0.7 on
        worker._first_train_step_forward_pre_hook_disabled = False
        worker._first_train_step_param_sync_func = None
        if worker.should_disable_forward_pre_hook and worker._forward_pre_hook_enabled():
            worker._disable_forward_pre_hook_until_next_train_step()
