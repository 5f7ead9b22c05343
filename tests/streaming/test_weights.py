"""Weight syncs, also those that fail or are cancelled halfway: who resumes generation, and who is let in."""

from __future__ import annotations

import asyncio

import pytest
from rigs.streaming.world import Fault, World, cancelled_after, failing_after, raised

from megapatch.streaming import StreamingConfig, TrainPump

SYNC = ["pause", "sync", "stamp", "resume"]


@pytest.mark.parametrize("deed", ["raise", "cancel"])
@pytest.mark.parametrize("place", [f"{when} {call}" for call in SYNC for when in ("before", "after")])
async def test_no_rollout_is_admitted_until_a_sync_has_succeeded(place, deed):
    world = await World.of("a", {place: deed})
    pump = world.pump()
    world.victim = asyncio.ensure_future(raised(pump.step()))
    while pump.admitted and not world.victim.done():
        await asyncio.sleep(0)
    waiting = asyncio.ensure_future(pump.rollouts_permitted())
    error = await world.victim
    await asyncio.sleep(0)
    assert isinstance(error, Fault if deed == "raise" else asyncio.CancelledError)
    assert pump.admitted == waiting.done() == (deed == "cancel")  # a cancellation is delivered when all is done
    assert world.paused == (place == "before resume" and deed == "raise")
    assert pump.version == 1 and world.trained == [["a"]]

    world.calls.clear()
    if not pump.admitted:
        await pump.step()  # which has nothing else left to do
        assert world.called() == ["pause", "sync 1", "stamp 1", "resume"]
        await asyncio.sleep(0)
        assert pump.admitted and waiting.done()


async def test_a_step_after_a_sync_by_hand_that_failed_syncs_first():
    """Nobody may begin a rollout before, so it would wait for ever."""
    world = World({"before sync": "raise"})
    pump = world.pump()

    async def generate():
        await pump.rollouts_permitted()
        await world.put("a")

    assert isinstance(await raised(pump.sync_weights()), Fault)
    world.calls.clear()
    rollouts = asyncio.ensure_future(generate())
    await asyncio.wait_for(pump.step(), 10)
    assert world.called()[:4] == ["pause", "sync 0", "stamp 0", "resume"]
    assert world.trained == [["a"]]
    assert pump.version == 1
    await rollouts


async def test_generation_without_set_weight_version_is_told_of_once(caplog):
    class Generation:
        pause_generation = resume_generation = staticmethod(lambda: None)

    world = World()
    pump = TrainPump(StreamingConfig(generations_per_prompt=1), world, world, world, Generation())
    for _ in range(3):
        await pump.sync_weights()
    assert caplog.text.count("Generation has no set_weight_version()") == 1
    assert pump.admitted


class Recording(World):
    """Generation that keeps its own record of being paused."""

    def __init__(self, plan=None):
        super().__init__(plan)
        self.generation_paused_event = asyncio.Event()

    async def pause_generation(self):
        await self.do("pause", self.generation_paused_event.set)

    async def resume_generation(self):
        await self.do("resume", self.generation_paused_event.clear)


async def test_a_pause_of_somebody_else_is_theirs():
    world = Recording({"before sync": "raise"})
    pump = world.pump()
    world.generation_paused_event.set()
    assert isinstance(await raised(pump.sync_weights()), Fault)
    for _ in range(2):
        await pump.sync_weights()
    assert not world.called("pause", "resume")
    assert pump.admitted and world.generation_paused_event.is_set()


@pytest.mark.parametrize("call", ["sync", "stamp"])
async def test_a_sync_that_fails_when_it_was_cancelled(call):
    world = World({f"before {call}": failing_after(10)})
    pump = world.pump()
    error = await cancelled_after(1, pump.sync_weights())
    assert isinstance(error, asyncio.CancelledError) and isinstance(error.__cause__, Fault)
    assert not pump.admitted and not world.paused


async def test_who_is_let_in_when_the_gate_has_shut_again_waits_on():
    world = World({"before sync": "raise"})
    pump = world.pump()
    assert isinstance(await raised(pump.sync_weights()), Fault)

    async def rollout():
        await pump.rollouts_permitted()
        return pump.admitted

    waiting = asyncio.ensure_future(rollout())
    await asyncio.sleep(0)
    pump._weights.admitted.set()
    pump._weights.admitted.clear()  # at once, before the rollout has its turn
    await asyncio.sleep(1)
    assert not waiting.done()
    await pump.sync_weights()
    assert await waiting


async def test_a_cancellation_is_delivered_where_the_resume_fails():
    world = Recording({"before resume": "raise"})
    pump = world.pump()
    world.plan["before sync"] = lambda: asyncio.sleep(10)
    error = await cancelled_after(1, pump.sync_weights())
    assert isinstance(error, asyncio.CancelledError)
    assert isinstance(error.__cause__, Fault) and str(error.__cause__) == "before resume"
    assert not pump.admitted
