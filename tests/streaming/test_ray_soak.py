"""A hundred groups and more on a real Ray: trainer and buffer are actors that fail now and then, before or after
they did what they were asked. No sample is lost, trained on twice, or trained on beyond its lag."""

from __future__ import annotations

import asyncio
import logging
import random
import re

import pytest

from megapatch.streaming import EmptyStepError, RolloutBuffer, StreamingConfig, TrainPump

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning"),  # Ray's own
    pytest.mark.usefixtures("local_ray"),
]

GROUPS, SAMPLES, PER_STEP, LAG = 120, 2, 4, 2
RATE = 0.02


class Fault(Exception):
    pass


class Chance:
    def __init__(self, seed):
        self.random, self.faults = random.Random(seed), 0

    def maybe(self, place):
        if self.random.random() < RATE:
            self.faults += 1
            raise Fault(place)


class Trainer:
    """Writes down what it has stepped on; a gradient is the list of its samples."""

    def __init__(self):
        self.chance, self.gradients = Chance(1), None
        self.steps = []

    def begin_train_step(self):
        assert self.gradients is None, "begun twice"
        self.chance.maybe("before begin")
        self.gradients = []
        self.chance.maybe("after begin")

    def prepare_logprobs(self, data, **which):
        self.chance.maybe("during prepare")
        return data

    def train_microbatch(self, data):
        self.chance.maybe("before microbatch")
        self.gradients.extend(data)
        self.chance.maybe("after microbatch")

    def finish_train_step(self):
        self.chance.maybe("before finish")
        self.steps.append(self.gradients)
        self.gradients = None

    def abort_train_step(self):
        self.chance.maybe("before abort")
        self.gradients = None
        self.chance.maybe("after abort")

    def known(self):
        return self.steps, self.gradients, self.chance.faults


class Buffer(RolloutBuffer):
    """Calls and replies get lost; what was cleared is written down."""

    def __init__(self):
        super().__init__(max_prompt_groups=9)
        self.chance, self.cleared = Chance(2), []

    async def claim(self, group):
        self.chance.maybe("before claim")
        data = super().claim(group)
        self.chance.maybe("after claim")
        return data

    async def give_back(self, groups):
        self.chance.maybe("before give_back")
        super().give_back(groups)
        self.chance.maybe("after give_back")

    async def clear(self, groups):
        self.chance.maybe("before clear")
        there = self._tags.keys()
        self.cleared += [key for group in groups for key in group.keys if key in there]
        super().clear(groups)
        self.chance.maybe("after clear")

    async def known(self):
        return self.cleared, set(self._tags), set(self.samples()), self.chance.faults


class Generation:
    """In this process: what is sampled bears the version that was synced."""

    def __init__(self):
        self.chance, self.version, self.born = Chance(3), 0, {}

    async def pause_generation(self):
        self.chance.maybe("before pause")

    async def resume_generation(self):
        self.chance.maybe("before resume")

    async def sync_weights(self):
        self.chance.maybe("before sync")
        await asyncio.sleep(0)
        self.chance.maybe("after sync")

    def set_weight_version(self, version):
        self.version = version
        self.chance.maybe("after stamp")

    async def roll_out(self, pump, buffer, numbers):
        for number in numbers:
            for place in range(SAMPLES):
                await pump.rollouts_permitted()
                key, version = (number, place), self.version
                self.born[key] = version
                await buffer.put.remote(key, {"group_id": number, "weight_version": version}, key)


async def soak():
    trainer, buffer = (ray.remote(num_cpus=0)(kind).remote() for kind in (Trainer, Buffer))
    generation, numbers = Generation(), iter(range(GROUPS))
    config = StreamingConfig(
        generations_per_prompt=SAMPLES,
        target_prompt_groups_per_step=PER_STEP,
        max_staleness=LAG,
        refresh_policy_logprobs=True,
    )
    pump = TrainPump(config, trainer, buffer, generation, generation)
    workers = [asyncio.ensure_future(generation.roll_out(pump, buffer, numbers)) for _ in range(6)]
    all_in = asyncio.gather(*workers)
    closing = asyncio.ensure_future(close_after(all_in, buffer))
    failures = []
    while True:
        try:
            await pump.step()
        except EmptyStepError:
            break
        except Fault as fault:
            failures.append(str(fault))
    await closing
    steps, gradients, faults = await trainer.known.remote()
    cleared, held, unclaimed, buffers_faults = await buffer.known.remote()
    faults += buffers_faults + generation.chance.faults
    trained = [key for step in steps for key in step]
    assert pump.version == len(steps)
    assert gradients is None
    assert len(trained) == len(set(trained)), "trained on twice"
    assert all(len(step) == PER_STEP * SAMPLES for step in steps)
    for version, step in enumerate(steps):
        assert all(0 <= version - generation.born[key] <= LAG for key in step), "trained on too late"
    assert held == unclaimed, "some are claimed by nobody"
    assert set(trained) <= set(cleared) and len(cleared) == len(set(cleared))
    assert set(cleared) | held == generation.born.keys() and not held & set(cleared), "some were lost"
    assert len(generation.born) == GROUPS * SAMPLES
    return len(trained), failures, faults


async def close_after(all_in, buffer):
    await all_in
    await buffer.close.remote()


def test_a_hundred_groups_and_more(caplog):
    caplog.set_level(logging.CRITICAL, logger="megapatch")
    trained, failures, faults = asyncio.run(
        asyncio.wait_for(soak(), 60)
    )  # lost samples fill the buffer, and nothing moves
    assert GROUPS * SAMPLES // 2 < trained < GROUPS * SAMPLES  # some were evicted
    assert len(failures) > 10 and faults >= len(failures)
    places = {re.search(r"(before|after|during) (\w+)$", failure)[0] for failure in failures}
    assert len(places) > 6, places
