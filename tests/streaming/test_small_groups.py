"""Prompt groups smaller than the data-parallel size, with real Megatron: trained on as by one call."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from rigs.imported import run_with_megatron

from megapatch.streaming import RolloutBuffer, StepTrainer, StreamingConfig, TrainPump
from megapatch.testing import init_parallel, tiny_gpt

GROUPS = 10


class InThisThread:
    """Calls a plain trainer in the event loop's thread: the stand-in for CUDA on CPU belongs to one thread."""

    def __init__(self, trainer):
        self.trainer = trainer

    async def begin_train_step(self):
        self.trainer.begin_train_step()

    async def train_microbatch(self, data):
        self.trainer.train_microbatch(data)

    async def finish_train_step(self):
        return self.trainer.finish_train_step()

    async def abort_train_step(self):
        self.trainer.abort_train_step()


class Generation:
    async def pause_generation(self): ...

    async def resume_generation(self): ...

    def set_weight_version(self, version): ...

    async def sync_weights(self): ...


async def train(trainer, samples, each):
    """Take a step on groups of one sample. Every rank does this, so all make the same calls."""
    buffer, generation = RolloutBuffer(), Generation()
    for number, sample in enumerate(samples):
        await buffer.put(number, {"group_id": number, "weight_version": 0}, sample)
    settings = {"target_prompt_groups_per_step": GROUPS, "prompt_groups_per_microbatch": each}
    config = StreamingConfig(generations_per_prompt=1, **settings)
    await TrainPump(config, trainer, buffer, generation, generation).step()


def parameters(rank, samples, each):
    from rigs.train_step.models import MEAN

    from megapatch.testing._data import forward_step
    from megapatch.train_step import TrainStep

    model, sizes = tiny_gpt(lr=1e-2), []

    def arguments(groups):
        mine = [sample for (sample,) in groups][rank::2]
        sizes.append(len(mine))
        return {
            "forward_step_func": partial(forward_step, **MEAN),
            "data_iterator": iter(mine),
            "num_microbatches": len(mine),
            "seq_length": model.seq,
            "micro_batch_size": 1,
        }

    before = {name: value.clone() for name, value in model.parameters().items()}
    trainer = StepTrainer(TrainStep(model.chunks, model.optimizer), arguments)
    asyncio.run(train(InThisThread(trainer), samples, each))
    after = model.parameters()
    assert all(not value.equal(before[name]) for name, value in after.items() if value.ndim > 1)
    return {name: value.tolist() for name, value in after.items()}, sizes


def by_two_calls_and_by_one(rank, world_size):
    import torch

    init_parallel()
    random = torch.Generator().manual_seed(7)
    samples = [torch.randint(32, (1, 9), generator=random) for _ in range(GROUPS)]
    return parameters(rank, samples, 4), parameters(rank, samples, GROUPS)


@pytest.mark.thorough
def test_groups_of_one_sample_on_two_ranks():
    (several, at_once), other = run_with_megatron(by_two_calls_and_by_one, 2)
    assert several[1] == other[0][1] == [2, 3] and at_once[1] == [5]
    assert several[0] == other[0][0]
    for name, values in several[0].items():
        assert flat(values) == pytest.approx(flat(at_once[0][name]), abs=1e-6), name


def flat(values):
    return [number for each in values for number in flat(each)] if isinstance(values, list) else [values]
