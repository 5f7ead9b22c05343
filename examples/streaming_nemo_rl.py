"""NeMo-RL's Policy and its worker for Megatron, driven by a TrainPump: one process trains a tiny GPT on CPU.

NEMO_RL_CHECKOUT names a checkout of NeMo-RL; else it is an imitation. Rigs of the tests stand in for GPUs and Ray.
"""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

from megapatch.streaming import RolloutBuffer, StreamingConfig, TrainPump
from megapatch.streaming.nemo_rl import InFlightUpdates, PolicyTrainer
from megapatch.testing import install_cuda_stubs, tiny_gpt

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
install_cuda_stubs()
from rigs.nemo_rl import policy as nemo_policy  # noqa: E402
from rigs.nemo_rl import worker as nemo_rl  # noqa: E402
from rigs.one_process import join_alone  # noqa: E402

SAMPLES, GROUPS, STEPS = 4, 3, 6


async def main():
    join_alone()
    nemo_policy.find_policies()
    policy = nemo_policy.policy_for(tiny_gpt(**nemo_rl.GPT))
    trainer, buffer = PolicyTrainer(policy, nemo_rl.nll_loss(), gbs=SAMPLES * GROUPS), RolloutBuffer()
    weights = SimpleNamespace(version=0, sync_weights=lambda: None)  # for a synchronizer, and for a manager
    weights.set_weight_version = lambda version: setattr(weights, "version", version)
    step_of = {"generations_per_prompt": SAMPLES, "target_prompt_groups_per_step": GROUPS}
    parts = StreamingConfig(**step_of, max_staleness=1), trainer, buffer, weights, InFlightUpdates(weights)
    pump = TrainPump(*parts, compute_advantages=concatenated, logger=SimpleNamespace(log_metrics=show))

    async def roll_out(group):  # the same samples in each step, where you would ask the engines
        async with pump.rollout(group):
            for number in range(SAMPLES):
                tag = {"group_id": group, "weight_version": weights.version}
                await buffer.put((group, number), tag, nemo_rl.batch(number, 1, rank=group % GROUPS))

    await asyncio.gather(pump.run(STEPS), *(roll_out(group) for group in range(GROUPS * STEPS)))


def concatenated(samples):  # and their advantages; this loss, a likelihood, needs none
    return type(samples[0]).from_batches(samples)


def show(metrics, step, prefix):
    if prefix == "train":
        print(f"step {step}: loss {metrics['loss']:.4f}", flush=True)


asyncio.run(main())
