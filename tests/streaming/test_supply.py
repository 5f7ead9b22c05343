"""Prompt groups are waited for: how long, what is told meanwhile, and how often the buffer is looked at."""

from __future__ import annotations

import asyncio
import logging

import pytest
from rigs.streaming.world import Fault, World, raised

from megapatch import MegapatchError
from megapatch.streaming import EmptyStepError, RolloutBuffer


def clock():
    return asyncio.get_running_loop().time()


async def puts(world, every, names, **tag):
    for name in names:
        await world.put(name, **tag)
        await asyncio.sleep(every)


# ------------------------------------------------------------------------------------------ rollout_timeout
@pytest.mark.parametrize("tag", [{"version": 9}, {"version": 0}, {"committed": False}], ids=str)
async def test_the_timeout_is_not_put_off_by_what_cannot_be_trained_on(tag):
    """Something is new whenever the buffer has answered."""
    world = World({"before changes": lambda: asyncio.sleep(0.5)})
    task = asyncio.ensure_future(raised(world.pump(version=5, rollout_timeout=10).step()))
    await puts(world, 0.25, range(100), **tag)
    assert task.done()
    assert "none came for 10 seconds (rollout_timeout)" in str(await task)


async def test_the_timeout_is_for_one_more_group_of_the_least_number():
    world = World()
    step = world.pump(min_prompt_groups_per_batch=5, rollout_timeout=10).step()
    await asyncio.gather(step, puts(world, 9, "abcde"))
    assert world.trained == [["a", "b", "c", "d", "e"]]


async def test_when_no_more_come_of_the_least_number_the_timeout_is_from_the_last_one_on():
    world = World()
    step = world.pump(min_prompt_groups_per_batch=5, rollout_timeout=10).step()
    error, _ = await asyncio.gather(raised(step), puts(world, 9, "abc"))
    assert isinstance(error, EmptyStepError) and error.backlog.eligible == 3
    assert clock() == 28


# ------------------------------------------------------------------------------------------ ten minutes
async def test_a_wait_of_ten_minutes_is_told_once(caplog):
    world = World()
    await world.put("half", expected_num_samples=2)
    task = asyncio.ensure_future(world.pump(orphan_timeout=None).step())
    await puts(world, 59, range(10), committed=False)
    assert not caplog.records
    await puts(world, 1000, range(10), committed=False)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("megapatch", logging.WARNING)
    assert record.getMessage().partition(" (see ")[0] == (
        "no prompt group to train on for 600 seconds, though rollouts may begin. Waiting: 11 samples in "
        "11 prompt groups, of which 0 eligible, 1 incomplete, 10 not committed, 0 too old, 0 from the future"
    )
    await world.put("a")
    await task


async def test_a_timeout_that_is_longer_still_comes(caplog):
    error = await raised(World().pump(rollout_timeout=1000).step())
    assert isinstance(error, EmptyStepError) and clock() == 1000
    assert caplog.text.count("no prompt group to train on for 600 seconds") == 1


async def test_nothing_is_told_while_groups_come(caplog):
    world = World()
    await asyncio.gather(world.pump(min_prompt_groups_per_batch=4).step(), puts(world, 590, "abcd"))
    assert world.trained and not caplog.records


# ------------------------------------------------------------------------------------------ looking
async def test_the_buffer_is_not_looked_at_again_for_a_group_that_was_seen():
    world = World()
    await puts(world, 0, "abc")
    await world.pump(target_prompt_groups_per_step=3).step()
    assert world.trained == [["a", "b", "c"]]
    assert world.calls.count("samples") == 1


async def test_the_buffer_is_looked_at_again_for_another_version():
    world = World()
    await world.put("a")
    await world.put("next", version=1)
    await world.pump().run(2)
    assert world.trained == [["a"], ["next"]]


class Exact(RolloutBuffer):
    """Changes only where there is something to change, as a `Buffer` may."""

    def give_back(self, groups):
        if any(key not in self.samples() for group in groups for key in group.keys):
            super().give_back(groups)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_the_buffer_is_looked_at_again_after_a_claim_that_failed(when):
    world = World({f"{when} claim": "raise"})
    world.buffer = Exact()
    await world.put("a")
    pump = world.pump()
    assert isinstance(await raised(pump.step()), Fault)
    await pump.step()
    assert world.trained == [["a"]]


# ------------------------------------------------------------------------------------------ empty steps
async def test_an_empty_step_says_what_was_waiting():
    world = World()
    await world.put("early", version=0)
    await world.put("half", samples=1, expected_num_samples=2)
    await world.put("future", version=1)
    await world.put("unfinished", committed=False)
    world.buffer.close()
    pump = world.pump(target_prompt_groups_per_step=2)
    with pytest.raises(EmptyStepError) as caught:
        await pump.step()
    error = caught.value
    assert isinstance(error, MegapatchError)
    for part in (
        "has 1 of its 2 prompt groups",
        "the buffer is closed",
        "3 samples in 3 prompt groups, of which 0 eligible, 1 incomplete, 1 not committed, 0 too old, 1 from "
        "the future",
        "too old meanwhile: 0",
    ):
        assert part in str(error)
    assert (error.trained, error.target, error.backlog.from_the_future) == (1, 2, 1)
    assert world.called() == ["claim early", "begin", "microbatch early", "abort", "give_back early"]
    assert pump.version == 0 and "early" in world.buffer.samples()


async def test_an_empty_step_says_what_was_evicted():
    """Where generation does not know its version, all that comes is too old."""
    world = World()
    await world.put("a")
    pump = world.pump()
    await pump.step()
    await world.put_each("bc", version=0)
    world.buffer.close()
    with pytest.raises(EmptyStepError, match="Evicted as too old meanwhile: 2 prompt groups") as caught:
        await pump.step()
    assert caught.value.evicted == 2
    assert world.called()[-1] == "clear b c"  # no step was open


async def test_a_step_whose_least_number_of_groups_does_not_come():
    world = World()
    await world.put("a")
    world.buffer.close()
    with pytest.raises(EmptyStepError, match=r"0 of its 2 .* needs 2 to go on.* 1 eligible"):
        await world.pump(min_prompt_groups_per_batch=2).step()


async def test_a_timeout_is_for_each_group():
    world = World()
    task = asyncio.ensure_future(world.pump(target_prompt_groups_per_step=3, rollout_timeout=60).step())
    clock = asyncio.get_running_loop().time
    for name in "ab":
        await asyncio.sleep(50)
        await world.put(name)
    for _ in range(3):  # which changes the buffer, and is no group
        await asyncio.sleep(15)
        await world.put("c", committed=False)
    with pytest.raises(EmptyStepError, match=r"none came for 60 seconds \(rollout_timeout\)"):
        await task
    assert clock() == 160


# ------------------------------------------------------------------------------------------ wrong moments
