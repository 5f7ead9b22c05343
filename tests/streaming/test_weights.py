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
    world = World({place: deed})
    await world.put("a")
    pump = world.pump()
    world.victim = asyncio.ensure_future(raised(pump.step()))
    while pump.admitted and not world.victim.done():
        await asyncio.sleep(0)
    waiting = asyncio.ensure_future(pump.rollouts_permitted())
    error = await world.victim
    await asyncio.sleep(0)
    call = place.split()[1]
    assert isinstance(error, Fault if deed == "raise" else asyncio.CancelledError)
    # A cancellation is delivered when all is done; pausing and resuming are paused_generation's to undo.
    done = call in ("sync", "stamp") and deed == "cancel"
    assert pump.admitted == waiting.done() == done
    assert world.paused == (place == "before resume" and deed == "raise")
    assert pump.version == 1 and world.trained == [["a"]]

    world.calls.clear()
    if not pump.admitted:
        await pump.step()  # which has nothing else left to do
        assert world.called() == ["pause", "sync 1", "stamp 1", "resume"]
        await asyncio.sleep(0)
        assert pump.admitted and waiting.done()


async def test_rollouts_are_admitted_when_generation_knows_the_version():
    world = World()
    await world.put("a")
    pump = world.pump()
    seen = {}
    for call in SYNC:
        for when in ("before", "after"):

            async def look(place=f"{when} {call}"):
                seen[place] = (pump.admitted, world.generation_version)

            world.plan[f"{when} {call}"] = look
    await pump.step()
    assert [admitted for admitted, _ in seen.values()] == [False] * 8
    assert [version for _, version in seen.values()] == [0] * 5 + [1] * 3
    assert pump.admitted


async def test_a_sync_by_hand_makes_up_for_one_that_failed():
    world = World({"before sync": "raise"})
    await world.put("a")
    await world.put("b", version=1)
    pump = world.pump()
    assert isinstance(await raised(pump.step()), Fault)
    assert not pump.admitted
    await pump.sync_weights()
    assert pump.admitted
    await pump.step()
    assert world.trained == [["a"], ["b"]]


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


# ------------------------------------------------------------------------------------------ a resume that failed
class Recording(World):
    """Generation that keeps its own record of being paused."""

    def __init__(self, plan=None):
        super().__init__(plan)
        self.generation_paused_event = asyncio.Event()

    async def pause_generation(self):
        await self.do("pause", self.generation_paused_event.set)

    async def resume_generation(self):
        await self.do("resume", self.generation_paused_event.clear)


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_a_resume_that_failed_is_made_up_for_by_the_next_sync(times):
    world = Recording()
    await world.put("a")
    pump = world.pump()
    for _ in range(times):
        world.plan["before resume"] = "raise"
        assert str(await raised(pump.sync_weights())) == "before resume"
        assert not pump.admitted and world.generation_paused_event.is_set()
    world.calls.clear()
    await pump.step()
    assert world.called()[-3:] == ["sync 1", "stamp 1", "resume"]  # it was paused
    assert pump.admitted and not world.generation_paused_event.is_set()
    await pump.sync_weights()
    assert world.called()[-4:] == ["pause", "sync 1", "stamp 1", "resume"]


async def test_rollouts_wait_for_the_resume_that_is_made_up_for():
    world = Recording({"before resume": "raise"})
    pump = world.pump()
    assert isinstance(await raised(pump.sync_weights()), Fault)
    seen = []

    async def look():
        seen.append(pump.admitted)

    world.plan["before resume"] = world.plan["after resume"] = look
    await pump.sync_weights()
    assert seen == [False, False] and pump.admitted


@pytest.mark.parametrize("deed", ["cancelled", "fails when it is done"])
async def test_after_a_resume_that_was_made_up_for_a_pause_is_somebody_elses(deed):
    world = Recording({"before resume": "raise"})
    pump = world.pump()
    await raised(pump.sync_weights())
    if deed == "cancelled":
        world.plan["before resume"] = lambda: asyncio.sleep(10)
        await cancelled_after(1, pump.sync_weights())
    else:
        world.plan["after resume"] = "raise"
        await raised(pump.sync_weights())
    world.plan.clear()
    assert not world.generation_paused_event.is_set()
    world.generation_paused_event.set()
    await pump.sync_weights()
    assert pump.admitted and world.generation_paused_event.is_set()


async def test_a_resume_that_is_made_up_for_is_waited_for_even_when_cancelled():
    world = Recording({"before resume": "raise"})
    pump = world.pump()
    assert isinstance(await raised(pump.sync_weights()), Fault)
    world.plan["before resume"] = lambda: asyncio.sleep(10)
    assert isinstance(await cancelled_after(1, pump.sync_weights()), asyncio.CancelledError)
    assert not world.generation_paused_event.is_set()
    await pump.sync_weights()
    assert pump.admitted and not world.generation_paused_event.is_set()


@pytest.mark.parametrize("before", ["nothing", "a resume that was made up for"])
async def test_a_pause_of_somebody_else_is_theirs(before):
    world = Recording()
    pump = world.pump()
    if before != "nothing":
        world.plan["before resume"] = "raise"
        assert isinstance(await raised(pump.sync_weights()), Fault)
        await pump.sync_weights()
        world.calls.clear()
    world.generation_paused_event.set()
    world.plan["before sync"] = "raise"
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
    await pump.sync_weights()  # and at once, before the rollout has its turn:
    world.plan["before sync"] = "raise"
    assert isinstance(await raised(pump.sync_weights()), Fault)
    await asyncio.sleep(1)
    assert not waiting.done()
    await pump.sync_weights()
    assert await waiting


@pytest.mark.parametrize("left_paused", [False, True])
async def test_a_cancellation_is_delivered_where_the_resume_fails(left_paused):
    world = Recording({"before resume": "raise"})
    pump = world.pump()
    if left_paused:
        assert isinstance(await raised(pump.sync_weights()), Fault)
        world.plan["before resume"] = "raise"
    world.plan["before sync"] = lambda: asyncio.sleep(10)
    error = await cancelled_after(1, pump.sync_weights())
    assert isinstance(error, asyncio.CancelledError)
    assert isinstance(error.__cause__, Fault) and str(error.__cause__) == "before resume"
    assert not pump.admitted
    world.plan.clear()
    await pump.sync_weights()
    assert pump.admitted and not world.generation_paused_event.is_set()
