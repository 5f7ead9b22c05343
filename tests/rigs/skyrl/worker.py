"""SkyRL's policy worker for Megatron around a tiny GPT: its own methods, without the Ray actor around them."""

import importlib
from types import SimpleNamespace

import torch

VOCABULARY, LENGTH, RESPONSE = 64, 12, 8
GPT = {"vocab": VOCABULARY, "seq": LENGTH, "hooks": False}


def settings():
    """Return the settings that any of the releases reads."""
    sampling = SimpleNamespace(temperature=1.0)
    megatron = SimpleNamespace(
        mtp_loss_weight=0.0, mtp_loss_chunk_size=None, mtp_loss_topk=None, moe_per_layer_logging=False
    )
    found = SimpleNamespace(
        micro_train_batch_size_per_gpu=1,
        max_tokens_per_microbatch=0,
        logprobs_chunk_size=None,
        vocab_entropy_chunk_size=None,
        vocab_entropy_chunk_memory_mb=1,
        use_sample_packing=False,
        remove_microbatch_padding=False,
        algorithm=SimpleNamespace(
            temperature=1.0,
            policy_loss_type="",
            use_entropy_loss=False,
            entropy_loss_coef=0.0,
            use_kl_loss=False,
            kl_loss_coef=0.0,
            enable_sample_support_replay=False,
        ),
        policy=SimpleNamespace(megatron_config=megatron),
        generator=SimpleNamespace(sampling_params=sampling),
    )
    found.trainer = found
    return found


def policy_loss(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    """Return the sum that advantages are scaled for; raise for an advantage that is not a number."""
    if advantages.isnan().any():
        raise ValueError("an advantage is not a number")
    return -(log_probs * advantages * loss_mask).sum(), {}


def worker_for(release, model):
    """Return a worker whose optimizer really steps; its scheduler does nothing, and neither do offloads."""
    module = importlib.import_module(f"{release.backend}.workers.megatron.megatron_worker")
    worker = object.__new__(module.MegatronPolicyWorkerBase)
    worker.cfg = settings()
    worker.actor_module, worker.optimizer = model.chunks, model.optimizer
    worker.scheduler = SimpleNamespace(step=lambda increment: None)
    worker.model = release.wrapped(model.chunks, model.optimizer)
    worker.model.cfg, worker.model.policy_loss_fn = worker.cfg, policy_loss
    strategy = importlib.import_module(f"{release.backend}.distributed.megatron.megatron_strategy")
    worker.strategy = object.__new__(strategy.MegatronStrategy)
    worker.strategy.world_size = torch.distributed.get_world_size()
    worker.strategy.offload_to_cpu = lambda *args, **kwargs: None
    worker._set_numa_affinity = lambda rank: None
    worker.get_node_local_rank = lambda: 0
    worker._get_module_for_offload = lambda: worker.actor_module
    worker.empty_cuda_cache = worker.enable_router_replay = worker.enable_sample_support_replay = False
    worker._micro_batches_accumulated = 0
    worker.adapter_store = None
    return worker


def samples(release, step, count):
    """Return a rank's samples as its forward_backward takes them, one per microbatch."""
    module = importlib.import_module(f"{release.backend}.training_batch")
    generator = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
    sequences = torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator)
    attended = torch.ones_like(sequences)
    attended[::2, :2] = 0
    values = {
        name: torch.randn(count, RESPONSE, generator=generator)
        for name in (
            "action_log_probs",
            "base_action_log_probs",
            "values",
            "returns",
            "advantages",
            "rollout_logprobs",
        )
    }
    masks = {name: torch.ones(count, RESPONSE) for name in ("loss_mask", "response_mask")}
    batch = module.TrainingInputBatch({"sequences": sequences, "attention_mask": attended, **values, **masks})
    batch.metadata = {"response_length": RESPONSE}
    return batch
