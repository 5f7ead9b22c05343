"""slime's training actor, driven by a TrainPump: one process trains a tiny GPT on CPU.

SLIME_CHECKOUT names a checkout of slime; else it is an imitation. Rigs of the tests stand in for GPUs and Ray.
"""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

from megapatch.streaming import RolloutBuffer, StreamingConfig, TrainPump
from megapatch.streaming.slime import GroupTrainer, GroupWeights
from megapatch.testing import install_cuda_stubs, tiny_gpt

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
install_cuda_stubs()
from rigs.one_process import join_alone  # noqa: E402
from rigs.slime import group as slime_group  # noqa: E402
from rigs.slime import train as slime  # noqa: E402

SAMPLES, GROUPS, STEPS = 4, 3, 6


async def main():
    join_alone()
    slime.find_slime()
    model = tiny_gpt(hooks=False)
    _, loop, group = slime_group.group_for(model, SAMPLES * GROUPS)
    trainer = GroupTrainer(group, batch_size=SAMPLES * GROUPS)
    weights, buffer = GroupWeights(group), RolloutBuffer()
    step_of = {"generations_per_prompt": SAMPLES, "target_prompt_groups_per_step": GROUPS}

    def show(metrics, step, prefix):
        if prefix == "train":
            losses = loop.seen[-SAMPLES * GROUPS :]
            print(f"step {step}: loss {sum(losses) / len(losses):.4f}", flush=True)

    logger = SimpleNamespace(log_metrics=show)
    pump = TrainPump(StreamingConfig(**step_of, max_staleness=1), trainer, buffer, weights, weights, logger=logger)

    async def roll_out(group):  # the same samples in each step, where you would ask slime's RolloutManager
        async with pump.rollout(group):
            for number, sample in enumerate(model.microbatches(group % GROUPS, SAMPLES)):
                tag = {"group_id": group, "weight_version": weights.version}
                await buffer.put((group, number), tag, sample)

    await asyncio.gather(pump.run(STEPS), *(roll_out(group) for group in range(GROUPS * STEPS)))


asyncio.run(main())
