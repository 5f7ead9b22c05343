"""Rollouts that can no longer be trained on are ended, if that is wanted."""

from __future__ import annotations

import asyncio
import sys

import pytest
from rigs.streaming.rollouts import begun
from rigs.streaming.world import Streaming, World, raised

OVER = {"oversampled_prompt_groups": 1, "abort_stale_rollouts": True}


class Body:
    """A rollout that takes forever, after one of two samples."""

    def __init__(self, world, pump, group="slow"):
        self.world, self.pump, self.group, self.events = world, pump, group, []

    async def live(self, meanwhile=lambda: asyncio.sleep(1e6)):
        async with self.pump.rollout(self.group):
            self.events.append("begun")
            tag = {"group_id": self.group, "weight_version": self.world.generation_version}
            await self.world.buffer.put((self.group, 0), tag, "half")
            try:
                await meanwhile()
            finally:
                self.events.append("left")
        self.events.append("went on")


async def step_beside(body_of=Body, meanwhile=None, world=None, **settings):
    """Take a step while a rollout is in flight that is too old after it."""
    world = world or World()
    pump = world.pump(**{"generations_per_prompt": 2, **OVER, **settings})
    body = body_of(world, pump)
    living = asyncio.ensure_future(raised(body.live(meanwhile) if meanwhile else body.live()))
    await asyncio.sleep(1)
    await world.put("quick", samples=2)
    await pump.step()
    await asyncio.sleep(1)
    return world, pump, body, living


async def test_its_body_is_cancelled_and_the_task_goes_on():
    world, pump, body, living = await step_beside()
    assert await living is None and body.events == ["begun", "left", "went on"]
    await world.put("next", samples=2, version=1)
    await pump.step()
    assert not len(world.buffer)  # also not what it had put
    assert world.trained == [["quick0", "quick1"], ["next0", "next1"]]


async def test_not_while_it_can_still_be_trained_on():
    _, _, body, living = await step_beside(max_staleness=1)
    assert body.events == ["begun"] and not living.done()
    living.cancel()


async def test_not_without_the_setting():
    _, _, body, living = await step_beside(abort_stale_rollouts=False)
    assert body.events == ["begun"]
    living.cancel()


async def test_its_place_is_free():
    world, pump, rollouts = await begun(**OVER)
    assert "".join(rollouts.begun) == "abc"
    await rollouts.end("a", "b")
    await pump.step()
    await asyncio.sleep(1)
    assert "".join(rollouts.begun) == "abcdef" and rollouts.tasks["c"].done()
    assert world.trained == [["a", "b"]]


async def test_all_parts_of_a_group_are_ended():
    class Parts(Body):
        async def live(self):
            await asyncio.gather(super().live(), self.part())

        async def part(self):
            async with self.pump.rollout(self.group):
                await asyncio.sleep(1e6)
            self.events.append("part, too")

    _, _, body, living = await step_beside(Parts)
    assert await living is None and set(body.events) == {"begun", "left", "went on", "part, too"}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not count cancellations")
async def test_a_cancellation_from_outside_is_still_one():
    async def cancel_then_wait():
        try:
            await asyncio.sleep(1e6)
        finally:
            living.cancel()  # while it is being aborted

    world = World()
    pump = world.pump(generations_per_prompt=2, **OVER)
    body = Body(world, pump)
    living = asyncio.ensure_future(body.live(cancel_then_wait))
    await asyncio.sleep(1)
    await world.put("quick", samples=2)
    await pump.step()
    await asyncio.wait([living])
    assert living.cancelled() and body.events == ["begun", "left"]


async def test_an_exception_of_the_body_is_raised():
    async def fail():
        try:
            await asyncio.sleep(1e6)
        finally:
            raise KeyError("cleaning up")

    _, _, body, living = await step_beside(meanwhile=fail)
    assert isinstance(await living, KeyError) and body.events == ["begun", "left"]


async def test_a_task_that_was_aborted_can_be_cancelled_later():
    """Its count of cancellations is what it was before."""

    class Worker(Body):
        async def live(self):
            await super().live()
            if sys.version_info >= (3, 11):
                assert asyncio.current_task().cancelling() == 0
            await asyncio.wait_for(asyncio.sleep(1), 5)
            self.events.append("works")

    _, _, body, living = await step_beside(Worker)
    assert await living is None and body.events[-1] == "works"


async def test_samples_are_dropped_again_after_clearing_them_has_failed():
    world, pump, _, _ = await step_beside()
    world.plan["before clear"] = "raise"
    await world.put("next", samples=2, version=1)
    assert await raised(pump.step())
    await pump.step()
    assert not len(world.buffer) and world.trained[1] == ["next0", "next1"]


async def test_their_seconds_are_logged_apart():
    heard = Streaming()
    await step_beside(logger=heard)
    assert heard[0]["aborted_rollout_seconds"] == pytest.approx(1.0, abs=0.01)
    assert "rollout_seconds" not in heard[0]
