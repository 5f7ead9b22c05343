"""A trainer, a buffer and generation that are Ray actors, in a local Ray of one process each."""

from __future__ import annotations

import asyncio

import pytest

from megapatch.streaming import Group, RolloutBuffer, StreamingConfig, TrainPump

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning"),  # Ray's own
    pytest.mark.usefixtures("local_ray"),
]


class Trainer:
    def __init__(self):
        self.calls = []

    def begin_train_step(self):
        self.calls.append("begin")

    def train_microbatch(self, data):
        if data == ["bad"]:
            raise ValueError("bad data")
        self.calls.append(" ".join(data))

    def finish_train_step(self):
        self.calls.append("finish")
        return {"loss": 1.0}

    def abort_train_step(self):
        self.calls.append("abort")

    def prepare_logprobs(self, data, refresh_policy_logprobs, refresh_reference_logprobs):
        assert refresh_policy_logprobs and not refresh_reference_logprobs
        return data

    def called(self):
        calls, self.calls = self.calls, []
        return calls


class AsyncTrainer(Trainer):
    """Its calls could overlap: what keeps them apart is that the pump waits for each."""

    under_way = 0

    async def train_microbatch(self, data):
        self.under_way += 1
        await asyncio.sleep(0.01)
        assert self.under_way == 1, "calls overlap"
        super().train_microbatch(data)
        self.under_way -= 1


class Generation:
    def __init__(self):
        self.told = []

    def pause_generation(self):
        self.told.append("pause")

    def resume_generation(self):
        self.told.append("resume")

    def sync_weights(self):
        self.told.append("sync")

    def set_weight_version(self, version):
        self.told.append(version)

    def all_told(self):
        return self.told


class Buffer(RolloutBuffer):
    """An asyncio actor: others can put samples in while the pump waits."""

    async def size(self):
        return len(self)


def actor(kind):
    return ray.remote(num_cpus=0)(kind).remote()


def test_trainer_buffer_and_generation_are_actors():
    async def main():
        trainer, buffer, generation = actor(AsyncTrainer), actor(Buffer), actor(Generation)
        config = StreamingConfig(
            generations_per_prompt=2, target_prompt_groups_per_step=3, refresh_policy_logprobs=True
        )
        pump = TrainPump(config, trainer, buffer, generation, generation)
        step = asyncio.ensure_future(pump.step())
        for key in ("a0", "a1", "b0", "b1", "c0", "c1"):
            await buffer.put.remote(key, {"group_id": key[0], "weight_version": 0}, key)
        await step
        assert await trainer.called.remote() == ["begin", "a0 a1", "b0 b1", "c0 c1", "finish"]
        assert await generation.all_told.remote() == ["pause", "sync", 1, "resume"]
        assert await buffer.size.remote() == 0
        assert (pump.version, pump.admitted) == (1, True)

    asyncio.run(main())


def test_an_actors_exception_aborts_the_step():
    async def main():
        trainer, buffer, generation = actor(Trainer), RolloutBuffer(), Generation()
        pump = TrainPump(StreamingConfig(generations_per_prompt=1), trainer, buffer, generation, generation)
        await buffer.put("bad", {"group_id": "bad", "weight_version": 0}, "bad")
        with pytest.raises(ValueError, match="bad data"):
            await pump.step()
        assert await trainer.called.remote() == ["begin", "abort"]
        assert list(buffer.samples()) == ["bad"]
        buffer.clear([Group("bad", ("bad",), 0)])
        await buffer.put("good", {"group_id": "good", "weight_version": 0}, "good")
        await pump.step()
        assert await trainer.called.remote() == ["begin", "good", "finish"]
        assert generation.told == ["pause", "sync", 1, "resume"]

    asyncio.run(main())
