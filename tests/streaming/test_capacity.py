"""Groups that the trainer got leave room for others, and nothing that is left behind stops a run."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from rigs.streaming.world import Streaming, World, raised

from megapatch.streaming import ConfigError, EmptyStepError, RolloutBuffer


class Bounded(World):
    def __init__(self, capacity, plan=None):
        super().__init__(plan)
        self.buffer = RolloutBuffer(capacity)
        self.max_prompt_groups = capacity


async def test_room_is_made_as_groups_are_handed_to_the_trainer():
    """With room for a step, the next one is generated while the trainer works on this one."""
    world = Bounded(2, {"before microbatch": lambda: asyncio.sleep(100)})
    pump = world.pump(target_prompt_groups_per_step=2, max_staleness=1)
    put = []

    async def rollouts():
        for name in "abcd":
            await world.put(name)
            put.append((name, asyncio.get_running_loop().time()))

    arriving = asyncio.ensure_future(rollouts())
    await pump.step()
    assert [name for name, _ in put] == list("abcd") and put[-1][1] < 100
    await pump.step()
    await arriving
    assert world.trained == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize("fails", ["before microbatch", "before finish"])
async def test_a_step_that_failed_has_its_groups_back_in_a_full_buffer(fails):
    world = Bounded(2, {fails: "raise"})
    pump = world.pump(target_prompt_groups_per_step=2, max_staleness=3)
    numbers = itertools.count()

    async def work():
        while True:
            async with pump.rollout(number := next(numbers)):
                await asyncio.sleep(1)
                tag = {"group_id": number, "weight_version": world.generation_version}
                await world.buffer.put(number, tag, str(number))

    workers = [asyncio.ensure_future(work()) for _ in range(5)]
    assert await raised(pump.step())
    await pump.run(5)
    assert len(world.trained) == 5 and not any(worker.done() for worker in workers)


def test_a_buffer_that_is_smaller_than_a_step_is_refused():
    with pytest.raises(
        ConfigError, match=r"max_prompt_groups is 3; .* target_prompt_groups_per_step \(4\) or more"
    ):
        Bounded(3).pump(target_prompt_groups_per_step=4)
    Bounded(4).pump(target_prompt_groups_per_step=4)


# ------------------------------------------------------------------------------------------ left behind
async def test_orphans_in_a_full_buffer_expire(caplog):
    world = Bounded(2)
    logged = Streaming()
    pump = world.pump(orphan_timeout=100, target_prompt_groups_per_step=1, logger=logged)
    await world.put("a", expected_num_samples=2)
    await world.put("b", committed=False)
    putting = asyncio.ensure_future(world.put("c"))
    await pump.step()
    await putting
    assert world.trained == [["c"]]
    assert 100 <= asyncio.get_running_loop().time() <= 130
    assert logged[0]["expired_prompt_groups"] == 2 and "2 prompt groups got no more samples" in caplog.text


async def test_a_group_that_goes_on_does_not_expire():
    world = World()
    pump = world.pump(orphan_timeout=100)
    stepping = asyncio.ensure_future(pump.step())
    for number in range(5):
        await world.buffer.put(number, {"group_id": "a", "weight_version": 0, "expected_num_samples": 5}, "x")
        await asyncio.sleep(90)
    await stepping
    assert world.trained == [["x"] * 5]


async def test_one_whose_rollout_runs_does_not_expire():
    world = World()
    pump = world.pump(orphan_timeout=100, rollout_timeout=5000)
    stepping = asyncio.ensure_future(pump.step())
    async with pump.rollout("a"):
        await world.buffer.put(0, {"group_id": "a", "weight_version": 0, "expected_num_samples": 2}, "x")
        await asyncio.sleep(1000)
        await world.buffer.put(1, {"group_id": "a", "weight_version": 0, "expected_num_samples": 2}, "y")
    await stepping
    assert world.trained == [["x", "y"]]


async def test_an_orphan_gives_its_rollouts_place_to_another():
    world = World()
    pump = world.pump(orphan_timeout=100)
    async with pump.rollout("a"):
        await world.put("a", expected_num_samples=2)

    async def another():
        async with pump.rollout("b"):
            await world.put("b")

    await asyncio.gather(pump.step(), another())
    assert world.trained == [["b"]]


async def test_none_expires_without_a_timeout():
    world = World()
    await world.put("a", expected_num_samples=2)
    error = await raised(world.pump(orphan_timeout=None, rollout_timeout=10**6).step())
    assert isinstance(error, EmptyStepError) and error.backlog.incomplete == 1


async def test_a_duplicate_that_is_put_after_its_group_was_trained_on_does_not_stop_the_run():
    world = Bounded(1)
    pump = world.pump(max_staleness=1)
    for step in range(3):
        await world.put(str(step), version=step)
        await pump.step()
        await asyncio.wait_for(world.put(str(step), version=step), 10)
    assert world.buffer.late_duplicates == 3 and not len(world.buffer)
