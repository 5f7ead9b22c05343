"""More rollouts than can be trained on, of which the first to end are; and fewer at a time."""

from __future__ import annotations

import asyncio

import pytest
from rigs.streaming.rollout_bias import mean, simulate
from rigs.streaming.rollouts import begun
from rigs.streaming.world import Fault, Streaming, World, raised, run

from megapatch import MisuseError


@pytest.mark.parametrize(("max_staleness", "first"), [(0, "abc"), (1, "abcde")])
@pytest.mark.parametrize("pick", ["weight_fifo", "ready_first"])
async def test_more_begin(max_staleness, first, pick):
    _, _, rollouts = await begun(max_staleness=max_staleness, pick=pick, oversampled_prompt_groups=1)
    assert "".join(rollouts.begun) == first


async def test_the_first_to_end_are_trained_on_and_the_last_is_dropped_in_silence(caplog):
    world, pump, rollouts = await begun(groups="abcdefg", oversampled_prompt_groups=1)
    await rollouts.end("c", "b")
    await pump.step()
    await asyncio.sleep(1)
    assert "".join(rollouts.begun) == "abcde"  # a still has its place among them
    await rollouts.end("a")
    await rollouts.end("d", "e")
    await pump.step()
    await asyncio.sleep(1)
    assert world.trained == [["c", "b"], ["d", "e"]] and not len(world.buffer)
    assert "".join(rollouts.begun) == "abcdefg"
    assert not caplog.records


async def test_places_are_kept_for_all_but_so_many():
    """Of a, b and e, which have to be in the second step or never, one may be lost; f and g could wait."""
    world, pump, rollouts = await begun(max_staleness=1, oversampled_prompt_groups=1)
    await rollouts.end("c", "d")
    await pump.step()
    await asyncio.sleep(1)
    assert "".join(rollouts.begun) == "abcdefg"
    stepping = asyncio.ensure_future(pump.step())
    await rollouts.end("f", "g")
    assert world.called("claim") == ["claim c", "claim d"]
    await rollouts.end("e")
    assert world.called("claim")[2:] == ["claim e"]
    await rollouts.end("a")
    await stepping
    await rollouts.end("b")
    await pump.step()
    assert ["".join(step) for step in world.trained] == ["cd", "ea", "fg"] and not len(world.buffer)


async def test_one_place_is_not_kept():
    """For a and b, which have to be in the second step or never, there is one place; the other is for f."""
    world, pump, rollouts = await begun(max_staleness=1, oversampled_prompt_groups=1)
    await rollouts.end("c", "d")
    await pump.step()
    rollouts.tasks["e"].cancel()
    await asyncio.sleep(1)
    stepping = asyncio.ensure_future(pump.step())
    await rollouts.end("f", "g")
    assert world.called("claim")[2:] == ["claim f"]
    await rollouts.end("b")
    await stepping
    assert ["".join(step) for step in world.trained] == ["cd", "fb"]


def test_steps_are_shorter_and_so_are_the_rollouts_in_them():
    """The page has these numbers, beside those without."""
    more = run(simulate("weight_fifo", 0, oversampled_prompt_groups=4))
    assert more.seconds_per_step == pytest.approx(5.7, abs=0.15)
    assert mean(more.trained) == pytest.approx(2.0, abs=0.15)
    assert more.thrown_away == pytest.approx(0.15, abs=0.015)


@pytest.mark.parametrize("pick", ["weight_fifo", "windowed"])
async def test_at_most_so_many_run_at_a_time(pick):
    world, pump, rollouts = await begun(max_staleness=1, pick=pick, max_rollouts_in_flight=3)
    assert "".join(rollouts.begun) == "abc"
    await rollouts.end("b")
    assert "".join(rollouts.begun) == "abcd"
    rollouts.tasks["a"].cancel()
    await asyncio.sleep(1)
    assert "".join(rollouts.begun) == "abcde"
    await rollouts.end("d", "c")
    await pump.step()
    assert world.trained == [["b", "d"]]


async def test_parts_of_a_group_count_once():
    _, pump, rollouts = await begun(groups="", max_staleness=1, max_rollouts_in_flight=1)
    async with pump.rollout("a"), pump.rollout("a"):
        rollouts.begin("b")
        await asyncio.sleep(1)
        assert not rollouts.begun
    await asyncio.sleep(1)
    assert rollouts.begun == ["b"]


# ------------------------------------------------------------------------------------- groups with equal rewards
TWO = {"generations_per_prompt": 2, "drop_equal_rewards": True}


async def put(world, group, *rewards, committed=True):
    for number, reward in enumerate(rewards):
        tag = {"group_id": group, "weight_version": world.generation_version, "committed": committed}
        await world.buffer.put(f"{group}{number}", {**tag, "reward": reward}, f"{group}{number}")


@pytest.mark.parametrize("equal", [(0, 0), (1.0, 1), (0.5, 0.5)])
async def test_training_is_on_the_others(equal):
    world, heard = World(), Streaming()
    for group, rewards in {"a": equal, "b": (0, 1), "c": equal, "d": (-1, 1)}.items():
        await put(world, group, *rewards)
    await world.pump(target_prompt_groups_per_step=2, logger=heard, **TWO).step()
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
