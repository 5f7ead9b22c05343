"""AReaL's own MegatronEngine around a tiny GPT, of AREAL_RELEASES and AREAL_CHECKOUT.

docs/testing.md says what has stand-ins.
"""

import contextlib
import importlib
import os
import sys
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import torch

from rigs.imported import of_family
from rigs.megatron.tiny_model import config_of, in_ddp, models_of
from rigs.releases import find_release, needs, releases
from rigs.stand_ins import Anything, BarePackages, StandIns

ENGINE = "areal.engine.megatron_engine"
CHECKPOINTER = "areal.engine.megatron_utils.checkpointer"
ROLLOUT = "areal.infra.remote_inf_engine"
PACKAGES = "areal", "areal.engine", "areal.engine.megatron_utils", "areal.infra", "areal.utils"
REAL = (ENGINE, CHECKPOINTER, ROLLOUT, "areal.engine.megatron_utils.megatron", "areal.utils.lock")
STAND_INS = (
    "aiohttp",
    "areal",
    "mbridge",
    "megatron.bridge",
    "ray",
    "requests",
    "torchdata",
    "transformers",
    "uvloop",
)
GRADS = {"overlap_grad_reduce": True}
BOTH = {**GRADS, "overlap_param_gather": True}
STEPS, VOCABULARY, LENGTH, MICROBATCHES = 3, 32, 8, 2


RELEASES = releases("AREAL")
needs_areal = needs("AREAL", RELEASES)


@of_family("areal")
def find_areal():
    """Make the release in AREAL_RELEASE importable: the setup of a rank."""
    find_release("AREAL_RELEASE")
    sys.meta_path[:0] = [BarePackages(PACKAGES), StandIns(STAND_INS, stand_in, real=REAL)]


def stand_in(module, name):
    return OURS.get(name, Anything(name, (), {}))


def _decorator(*args, **kwargs):
    return lambda function: function


def _log_probabilities(logits, labels, **ignored):
    found = torch.log_softmax(logits.float(), -1)
    return found.gather(-1, labels[..., None])[..., 0], -(found.exp() * found).sum(-1)


def _forward(model, microbatch, **ignored):
    tokens = microbatch["input_ids"]
    return model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)


def _total_weight(microbatches, weight_of, group):
    total = sum(weight_of(microbatch) for microbatch in microbatches.mbs)
    torch.distributed.all_reduce(total, group=group)
    return total


def _sum_of_losses(losses, group):
    total = torch.stack(losses).sum()
    torch.distributed.all_reduce(total, group=group)
    return total


OURS = {
    "TrainEngine": object,
    "InferenceEngine": object,
    "trace_perf": _decorator,
    "trace_scope": lambda *ignored: contextlib.nullcontext(),
    "patch_bridge_for_tree_training": lambda *ignored: contextlib.nullcontext(),
    "gather_logprobs_entropy": _log_probabilities,
    "packed_context_parallel_forward": _forward,
    "compute_total_loss_weight": _total_weight,
    "aggregate_eval_losses": _sum_of_losses,
    "unpad_logits": lambda output, *ignored, **also_ignored: output,
    "configure_pipeline_layer_splits": lambda strategy, hf_config, tf_config: tf_config,
    "requires_padded_seq": lambda model_type: False,
    "is_valid_vision_model": lambda model_type: False,
    "is_tms_enabled": lambda: False,
    "get_seed": lambda: 1234,
    "lang_config": lambda config: config,
    "warmup_process_groups": lambda *groups: None,
    "DIST_GROUP_DEFAULT_TIMEOUT": timedelta(hours=1),
    "get_named_parameters": lambda chunks, experts: (
        pair for chunk in chunks for pair in chunk.named_parameters()
    ),
    "save_weights_to_hf_with_mbridge_fast": lambda models, **ignored: wanted["saved"](models),
    "make_mcore_model": lambda **given: _new_model(given["tf_config"]),
    "make_hf_and_mcore_config": lambda *ignored, dtype, **also_ignored: (
        SimpleNamespace(model_type="tiny", vocab_size=VOCABULARY),
        config_of(dtype, **wanted["config"]),
    ),
    "current_platform": SimpleNamespace(
        communication_backend="gloo",
        set_device=lambda index: None,
        set_numa_affinity=lambda index: None,
        synchronize=lambda: None,
        empty_cache=lambda: None,
        current_device=lambda: "cpu",
        device_type="cpu",
    ),
}
wanted = {"config": {}, "ddp": {}}


def _new_model(config):
    from megatron.core.distributed import DistributedDataParallelConfig

    with torch.device("cpu"):
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, bucket_size=1000, **wanted["ddp"]
        )
        return in_ddp(models_of(config, VOCABULARY, LENGTH), config, ddp_config)


# ------------------------------------------------------------------------------------------ the engine
def engine_of(overlap=None, dtype="float32", pp=1, beside=False, lr=0.1, **config):
    """Return AReaL's own engine, initialized by its own methods.

    It sets up a layout of its own unless it is `beside` another engine.
    """
    module = importlib.import_module(ENGINE)
    wanted.update(config=config, ddp=overlap or {})
    engine = module.MegatronEngine(_config(dtype, overlap or {}, lr))
    engine.logger = OURS_LOGGER
    parallel = {"tensor_parallel_size": 1, "context_parallel_size": 1, "expert_parallel_size": 1}
    engine._make_parallel_strategy = lambda given: SimpleNamespace(
        pipeline_parallel_size=pp,
        virtual_pipeline_parallel_size=1,
        expert_tensor_parallel_size=1,
        data_parallel_size=2 // pp,
        **parallel,
    )
    engine._init_context_and_model_parallel_group = lambda: None
    with contextlib.nullcontext() if beside else _nothing_set_up():
        engine.create_process_group(SimpleNamespace())
    engine._prepare_mb_list = Microbatches
    engine._load_model_from_hf = lambda path: None
    with mock.patch.dict(os.environ, LOCAL_RANK="cpu"), mock.patch.object(module, "int", _device, create=True):
        engine.initialize(None, SimpleNamespace(total_train_steps=100))
    engine._collect_param = lambda name, parameter: (parameter, parameter.numel())
    return engine


def _device(text):
    """AReaL's device is the index of a GPU."""
    return text if text == "cpu" else int(text)


@contextlib.contextmanager
def _nothing_set_up():
    """AReaL sets up Megatron's parallel state where torch.distributed is not set up; in a rank of ours it is."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    with (
        mock.patch("torch.distributed.is_initialized", side_effect=[False, *[True] * 1000]),
        mock.patch("torch.distributed.init_process_group"),
    ):
        yield


OURS_LOGGER = SimpleNamespace(info=print, warning=print)
OURS["getLogger"] = lambda name: OURS_LOGGER


def _config(dtype, overlap, lr):
    ddp = SimpleNamespace(
        use_distributed_optimizer=True, align_param_gather=False, **{**dict.fromkeys(BOTH), **overlap}
    )
    megatron = SimpleNamespace(
        ddp=ddp,
        fp8_config=None,
        bridge_type="none",
        use_deterministic_algorithms=False,
        virtual_pipeline_parallel_size=1,
        use_bridge_for_update_weights=False,
        overlap_param_gather_with_optimizer_step=False,
        use_precision_aware_optimizer=False,
        main_grads_dtype="float32",
        main_params_dtype="float32",
        exp_avg_dtype="float32",
        exp_avg_sq_dtype="float32",
        use_checkpoint_opt_param_scheduler=False,
        async_save=False,
        use_mbridge_save=False,
    )
    optimizer = SimpleNamespace(
        type="adam", lr=lr, min_lr_ratio=1.0, weight_decay=0.0, beta1=0.9, beta2=0.95, eps=1e-8,
        gradient_clipping=1e9, warmup_steps_proportion=0.0, lr_scheduler_type="constant",
    )  # fmt: skip
    return SimpleNamespace(
        dtype=dtype, optimizer=optimizer, megatron=megatron, enable_tree_training=False, use_lora=False,
        experiment_name="tiny", trial_name="tiny",
        path="tiny", is_critic=False, disable_dropout=False, gradient_checkpointing=False, temperature=1.0,
    )  # fmt: skip


class Microbatches(list):
    """A rank's samples, as AReaL's own list of microbatches gives them to the engine."""

    max_seqlen = LENGTH

    def __init__(self, samples, count=MICROBATCHES):
        self.mbs = [{"input_ids": part} for part in samples["input_ids"].chunk(count)]
        nothing = {"padding_length": 0, "old_cu_seqlens": None, "padded_to_length": LENGTH}
        super().__init__(SimpleNamespace(padded_mb=dict(part), orig_mb=part, **nothing) for part in self.mbs)

    def to(self, device):
        return self


def samples(step):
    rank = torch.distributed.get_rank() if _data_parallel() else 0
    generator = torch.Generator().manual_seed(10 * step + rank)
    return {"input_ids": torch.randint(0, VOCABULARY, (MICROBATCHES, LENGTH), generator=generator)}


def _data_parallel():
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_world_size() > 1


def train(engine, step):
    """AReaL's own train_batch(), with a loss that is the mean over tokens."""
    engine._normalize_batch_input = lambda given: (given, None)
    return engine.train_batch(samples(step), *LOSS)


def evaluate(engine, count):
    """AReaL's own eval_batch(), with the same loss, in this many microbatches."""
    engine._normalize_batch_input = lambda given: (given, None)
    with mock.patch.object(engine, "_prepare_mb_list", lambda given: Microbatches(given, count)):
        return float(engine.eval_batch(samples(9), *LOSS))


LOSS = (
    lambda logprobs, *ignored, **also_ignored: -logprobs.mean(),
    lambda microbatch: torch.tensor(float(microbatch["input_ids"].numel())),
)
"""A loss function, and the weight of a microbatch."""


def parameters(engine):
    return {
        name: parameter.detach().clone() for chunk in engine.model for name, parameter in chunk.named_parameters()
    }
