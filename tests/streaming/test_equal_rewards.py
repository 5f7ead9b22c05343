"""Groups whose samples all have the same reward are dropped, and others begin in their place."""

from __future__ import annotations

import asyncio

import pytest
from rigs.streaming.world import Fault, World, raised

from megapatch import MisuseError

TWO = {"generations_per_prompt": 2, "drop_equal_rewards": True}


async def put(world, group, *rewards, committed=True):
    for number, reward in enumerate(rewards):
        tag = {"group_id": group, "weight_version": world.generation_version, "committed": committed}
        await world.buffer.put(f"{group}{number}", {**tag, "reward": reward}, f"{group}{number}")


@pytest.mark.parametrize("equal", [(0, 0), (1.0, 1), (0.5, 0.5)])
async def test_training_is_on_the_others(equal):
    world, heard = World(), []

    class Logger:
        def log_metrics(self, metrics, step, prefix):
            heard.append(metrics) if prefix == "streaming" else None

    for group, rewards in {"a": equal, "b": (0, 1), "c": equal, "d": (-1, 1)}.items():
        await put(world, group, *rewards)
    await world.pump(target_prompt_groups_per_step=2, logger=Logger(), **TWO).step()
    assert world.trained == [["b0", "b1", "d0", "d1"]] and not len(world.buffer)
    assert heard[0]["equal_rewards_prompt_groups"] == 2 and heard[0]["evicted_prompt_groups"] == 0


async def test_they_stay_without_the_setting():
    world = World()
    await put(world, "a", 0, 0)
    await world.pump(generations_per_prompt=2).step()
    assert world.trained == [["a0", "a1"]]


async def test_none_is_judged_before_it_is_complete_and_committed():
    world = World()
    await put(world, "a", 1)
    await put(world, "b", 0, 0, committed=False)
    stepping = asyncio.ensure_future(world.pump(**TWO).step())
    await asyncio.sleep(1)
    assert not world.called()
    await world.buffer.put("b1", {"group_id": "b", "weight_version": 0, "reward": 1}, "b1")
    await world.buffer.put("b0", {"group_id": "b", "weight_version": 0, "reward": 0}, "b0")
    await stepping
    assert sorted(world.trained[0]) == ["b0", "b1"]


async def test_another_rollout_begins_for_each():
    world, begun = World(), []
    pump = world.pump(target_prompt_groups_per_step=2, **TWO)

    async def roll_out(number):
        async with pump.rollout(str(number)):
            begun.append(number)
            await asyncio.sleep(1)
            await put(world, str(number), 0, number % 3)  # 0 and 3 are equal

    tasks = [asyncio.ensure_future(roll_out(number)) for number in range(6)]
    await pump.step()
    assert world.trained == [["10", "11", "20", "21"]]
    assert begun == [0, 1, 2]  # and the next ones when weights have been synced
    for task in tasks:
        task.cancel()


async def test_they_are_dropped_again_after_clearing_them_has_failed():
    world = World({"before clear": "raise"})
    await put(world, "a", 0, 0)
    await put(world, "b", 0, 1)
    pump = world.pump(**TWO)
    assert isinstance(await raised(pump.step()), Fault)
    await pump.step()
    assert world.trained == [["b0", "b1"]] and not len(world.buffer)


@pytest.mark.parametrize(
    ("tag", "told"),
    [
        ({}, "has no reward in its tag; expected a number, as drop_equal_rewards is set"),
        ({"reward": "x"}, "reward='x'"),
    ],
)
async def test_a_reward_that_is_missing_or_no_number(tag, told):
    world = World()

    async def train():
        await world.put("a", samples=2, **tag)
        await world.pump(**TWO).step()

    error = await raised(train())
    assert isinstance(error, MisuseError) and told in str(error) and "'a0'" in str(error)
