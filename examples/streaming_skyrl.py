"""SkyRL's worker for Megatron and its dispatch, driven by a TrainPump: two Ray actors train a tiny GPT on CPU."""

import asyncio
from types import SimpleNamespace

import ray
import torch
from _skyrl_on_cpu import ENGINES, LENGTH, VOCABULARY, Worker
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.workers.worker import PPORayActorGroup
from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch
from skyrl.train.config import SkyRLTrainConfig

from megapatch.streaming import RolloutBuffer, StreamingConfig, TrainPump
from megapatch.streaming.skyrl import DispatchTrainer, SamplerWeights

SAMPLES, GROUPS, STEPS = 8, 3, 6


def batch_of(samples):
    tokens, mask = torch.stack(samples), torch.ones(SAMPLES, LENGTH - 1)
    rewards = (tokens[:, 1:] % 2 == 0).float()  # for even tokens
    fields = dict(sequences=tokens, attention_mask=torch.ones_like(tokens), loss_mask=mask, response_mask=mask)
    fields["action_log_probs"] = (mask / VOCABULARY).log()
    fields["advantages"] = (rewards - rewards.mean()) / (GROUPS * mask.numel())  # by all tokens of the step
    batch = TrainingInputBatch(fields)
    batch.metadata = {"response_length": LENGTH - 1}
    return batch


async def main():
    ray.init(runtime_env={"worker_process_setup_hook": "megapatch.testing.install_cuda_stubs"})
    config = SkyRLTrainConfig()
    config.trainer.placement.colocate_all = config.trainer.placement.colocate_policy_ref = False
    config.trainer.strategy, config.trainer.algorithm.use_kl_loss = "megatron", False
    config.trainer.remove_microbatch_padding = False  # it takes Transformer Engine
    ranks = PPORayActorGroup(config.trainer, 2, 1, ray.remote(Worker), num_gpus_per_actor=0)
    ray.get(ranks.async_init_model())
    dispatch = WorkerDispatch(config, ranks, inference_engine_client=ENGINES)
    trainer, weights, buffer = DispatchTrainer(dispatch), SamplerWeights(dispatch), RolloutBuffer()
    step_of = {"generations_per_prompt": SAMPLES, "target_prompt_groups_per_step": GROUPS}
    settings = StreamingConfig(**step_of, max_staleness=1)
    logger = SimpleNamespace(log_metrics=show)
    pump = TrainPump(settings, trainer, buffer, weights, weights, compute_advantages=batch_of, logger=logger)

    async def roll_out(group):  # random tokens, where you would ask the engines
        async with pump.rollout(group):
            for number in range(SAMPLES):
                tag = {"group_id": group, "weight_version": weights.version}
                await buffer.put((group, number), tag, torch.randint(VOCABULARY, (LENGTH,)))

    await asyncio.gather(pump.run(STEPS), *(roll_out(group) for group in range(GROUPS * STEPS)))


def show(metrics, step, prefix):
    if prefix == "train":
        print(f"step {step}: loss {metrics['policy_loss']:.4f}", flush=True)


asyncio.run(main())
