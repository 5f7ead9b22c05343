"""A prompt whose rollout fails gets more attempts, and nothing of those that failed is left."""

from __future__ import annotations

import asyncio
import logging

import pytest
from rigs.streaming.rollouts import begun
from rigs.streaming.world import Streaming, World, raised, run

from megapatch import MisuseError


class Prompt:
    """Fails in its first attempts, after one of two samples."""

    def __init__(self, world, group, failures=0, after=1):
        self.world, self.group, self.failures, self.after, self.attempts = world, group, failures, after, 0

    async def generate(self):
        self.attempts += 1
        for number in range(2):
            if number == self.after and self.attempts <= self.failures:
                raise ConnectionError(f"attempt {self.attempts}")
            tag = {"group_id": self.group, "weight_version": self.world.generation_version}
            await self.world.buffer.put((self.group, number), tag, f"{self.group}{number}/{self.attempts}")
            await asyncio.sleep(1)
        if self.after == 2 and self.attempts <= self.failures:
            raise ConnectionError("when all was there")


def pair(**settings):
    world = World()
    return world, world.pump(generations_per_prompt=2, **settings)


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("training", [False, True])
def test_the_attempt_that_succeeds_is_trained_on(caplog, after, training):
    async def main():
        world, pump = pair()
        prompt = Prompt(world, "a", failures=2, after=after)
        stepping = asyncio.ensure_future(pump.step()) if training else None
        await asyncio.sleep(1)
        assert await pump.roll_out("a", prompt.generate) is True
        await (stepping or pump.step())
        assert world.trained == [["a0/3", "a1/3"]] and prompt.attempts == 3 and not len(world.buffer)

    with caplog.at_level(logging.WARNING, logger="megapatch"):
        run(main())
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"attempt {number} of 3 to roll out prompt group 'a' failed, and it begins again" for number in (1, 2)
    ]


async def test_the_last_failure_is_raised_and_the_place_is_free():
    world, pump = pair()
    prompt = Prompt(world, "a", failures=9)
    error = await raised(pump.roll_out("a", prompt.generate, attempts=2))
    assert isinstance(error, ConnectionError) and str(error) == "attempt 2" and prompt.attempts == 2
    assert not len(world.buffer)
    assert await pump.roll_out("b", Prompt(world, "b").generate)
    await pump.step()
    assert world.trained == [["b0/1", "b1/1"]]


@pytest.mark.parametrize("trained", [False, True])
async def test_a_failure_after_all_samples_were_there_is_raised_and_they_stay(trained):
    world, pump = pair(max_staleness=1)
    prompt = Prompt(world, "a", failures=1, after=2)
    stepping = asyncio.ensure_future(pump.step()) if trained else None
    assert isinstance(await raised(pump.roll_out("a", prompt.generate)), ConnectionError)
    await (stepping or pump.step())
    assert prompt.attempts == 1 and world.trained == [["a0/1", "a1/1"]]


async def test_a_cancellation_is_not_tried_again():
    world, pump = pair()
    prompt = Prompt(world, "a")
    rolling = asyncio.ensure_future(pump.roll_out("a", prompt.generate))
    await asyncio.sleep(0.5)
    rolling.cancel()
    await asyncio.wait([rolling])
    assert rolling.cancelled() and prompt.attempts == 1


@pytest.mark.parametrize("attempts", [1, 2])
async def test_a_rollout_that_was_aborted_begins_again_with_new_weights(attempts):
    world, pump = pair(oversampled_prompt_groups=1, abort_stale_rollouts=True)
    slow = Prompt(world, "slow")
    original, world.generation_version = slow.generate, 0

    async def generate():
        await original() if slow.attempts else await half()

    async def half():
        slow.attempts = 1
        await world.buffer.put(("slow", 0), {"group_id": "slow", "weight_version": 0}, "old")
        await asyncio.sleep(1e6)

    rolling = asyncio.ensure_future(pump.roll_out("slow", generate, attempts))
    await asyncio.sleep(1)
    await world.put("quick", samples=2)
    await pump.step()
    assert await rolling is (attempts == 2)
    if attempts == 2:
        await pump.step()
        assert world.trained == [["quick0", "quick1"], ["slow0/2", "slow1/2"]]
    assert not len(world.buffer)


async def test_retries_are_counted():
    heard = Streaming()
    world, pump = pair(logger=heard, max_staleness=1)
    for group, failures in (("a", 2), ("b", 0)):
        await pump.roll_out(group, Prompt(world, group, failures).generate)
        await pump.step()
    assert heard[0]["rollout_retries"] == 2 and "rollout_retries" not in heard[1]


@pytest.mark.parametrize("attempts", [0, -1, "3", 1.5])
async def test_what_is_no_number_of_attempts(attempts):
    world, pump = pair()
    with pytest.raises(MisuseError, match="expected a whole number above 0"):
        await pump.roll_out("a", Prompt(world, "a").generate, attempts)


async def test_another_attempt_waits_for_its_turn():
    _, pump, rollouts = await begun(groups="abc")
    begins = []

    async def generate():
        begins.append(asyncio.get_running_loop().time())
        raise ConnectionError

    rolling = asyncio.ensure_future(raised(pump.roll_out("d", generate, attempts=2)))
    await asyncio.sleep(1)
    assert not begins
    for group in "abc":
        rollouts.tasks[group].cancel()
    assert isinstance(await rolling, ConnectionError) and len(begins) == 2


async def test_a_group_that_cannot_be_one():
    world, pump = pair()
    with pytest.raises(TypeError, match="unhashable"):
        await pump.roll_out([], Prompt(world, "a").generate)
