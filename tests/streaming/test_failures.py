"""Something fails, or the pump is cancelled, at any await of a step: what is undone, and what comes next."""

from __future__ import annotations

import asyncio
import sys

import pytest
from rigs.streaming.world import Fault, World, failing_after, raised

from megapatch.streaming import StreamingConfig, TrainPump

CALLS = ["changes", "samples", "claim", "prepare", "begin", "microbatch", "finish", "clear"]
PLACES = [f"{when} {call}" for call in CALLS for when in ("before", "after")]
PLACES += ["before wait", "after wait"]
DEEDS = ["raise", "cancel"]


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("place", PLACES)
async def test_wherever_it_fails(place, deed):
    """In a step of two groups, of which the second comes late."""
    world = World({place: deed})
    pump = world.pump(target_prompt_groups_per_step=2, refresh_policy_logprobs=True, version=5)

    async def rollouts():
        await world.put("a", version=5)
        await asyncio.sleep(1)
        await world.put("b", version=5)

    arriving = asyncio.ensure_future(rollouts())
    world.victim = asyncio.ensure_future(raised(pump.step()))
    error = await world.victim
    await arriving
    assert place not in world.plan, "not reached"
    assert isinstance(error, Fault if deed == "raise" else asyncio.CancelledError), error

    # A cancellation waits for finish and clear. An optimizer that steps and then fails: see Trainer.
    stepped = "clear" in place or ("finish" in place and deed == "cancel")
    assert pump.version == (6 if stepped else 5)
    assert world.trained == ([["a", "b"]] if stepped or (place, deed) == ("after finish", "raise") else [])
    assert not world.is_open
    assert len(world.called("abort")) == ("before begin" in world.reached and not stepped)
    if not stepped:
        assert world.buffer.samples().keys() == {"a", "b"}
    else:  # nobody gets them again
        assert not world.buffer.samples()
        assert len(world.buffer) == (2 if (place, deed) == ("before clear", "raise") else 0)
    assert not world.called("sync") and pump.admitted

    world.calls.clear()
    world.trained.clear()
    await pump.step()
    assert world.trained == ([] if stepped else [["a", "b"]])
    assert pump.version == 6 == world.generation_version
    assert not len(world.buffer)
    to_clear = not stepped or ("clear" in place and deed == "raise")
    assert world.called("clear") == (["clear a b"] if to_clear else [])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("deed", DEEDS)
async def test_an_eviction_that_fails_ends_the_step(when, deed):
    world = World()
    await world.put("a", version=5)
    pump = world.pump(target_prompt_groups_per_step=2, version=5)
    world.victim = asyncio.ensure_future(raised(pump.step()))
    await asyncio.sleep(1)
    world.plan[f"{when} clear"] = deed
    await world.put("stale", version=4)
    assert await world.victim
    assert world.called()[-2:] == ["abort", "give_back a"]
    assert pump.version == 5
    await world.put("b", version=5)
    await pump.step()
    assert world.trained == [["a", "b"]] and not len(world.buffer)


async def test_a_failing_microbatch_is_noticed_while_groups_are_waited_for():
    world = World({"before microbatch": failing_after(10)})
    await world.put("a")
    assert isinstance(await raised(world.pump(target_prompt_groups_per_step=2).step()), Fault)
    assert world.called() == ["claim a", "begin", "abort", "give_back a"]


async def test_after_a_failing_microbatch_no_other_is_made():
    world = World({"before microbatch": failing_after(10)})
    for name in "abcd":
        await world.put(name)
    pump = world.pump(target_prompt_groups_per_step=4, max_microbatches_in_flight=3)
    assert isinstance(await raised(pump.step()), Fault)
    assert world.reached.count("before microbatch") == 1
    assert world.called() == [
        *["claim a", "begin", "claim b", "claim c", "abort", "give_back a b c"],
    ]


async def test_a_call_under_way_is_waited_for_and_the_queued_ones_are_not_made():
    world = World({"before microbatch": lambda: asyncio.sleep(10)})
    for name in "abc":
        await world.put(name)
    pump = world.pump(target_prompt_groups_per_step=3, max_microbatches_in_flight=3)
    task = asyncio.ensure_future(pump.step())
    await asyncio.sleep(1)
    for _ in range(3):  # however often
        task.cancel()
        await asyncio.sleep(1)
        assert not task.done()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.called() == [
        *["claim a", "begin", "claim b", "claim c", "microbatch a", "abort", "give_back a b c"]
    ]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.timeout() is from Python 3.11 on")
async def test_a_timeout_is_still_one():
    world = World({"before finish": lambda: asyncio.sleep(10)})
    await world.put("a")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await world.pump().step()
    assert asyncio.current_task().cancelling() == 0
    assert world.called()[-2:] == ["finish", "clear a"]


# ------------------------------------------------------------------------------------------ once for a group
@pytest.mark.parametrize("place", ["before microbatch", "before finish", "after abort", "before advantages end"])
@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("refresh", [False, True])
async def test_advantages_that_change_data_in_place_are_computed_once(place, deed, refresh):
    world = World({place: deed})
    if place == "after abort":
        world.plan["before microbatch"] = "raise"
    rewards = {"a": [5], "b": [7]}
    trained = []

    async def advantages(data):
        data[0] *= 10
        if (await world.point("before advantages end")) is None:
            return data

    class Rewarding(type(world.buffer)):
        def claim(self, group):
            super().claim(group)
            return rewards[group.group_id]

    class Trainer:
        def __getattr__(self, name):
            return getattr(world, name)

        async def train_microbatch(self, data):
            trained.append(data[0])
            await world.point("before microbatch")

        async def prepare_logprobs(self, data, **which):
            return data

    world.buffer = Rewarding()
    for name in "ab":
        await world.put(name)
    config = StreamingConfig(
        generations_per_prompt=1, target_prompt_groups_per_step=2, refresh_policy_logprobs=refresh
    )
    pump = TrainPump(config, Trainer(), world, world, world, compute_advantages=advantages)
    world.victim = asyncio.ensure_future(raised(pump.step()))
    assert await world.victim
    failed = (place, deed) == ("before advantages end", "raise")  # whoever fails in the middle undoes it
    if failed:
        rewards["a"][0] = 5
    trained.clear()
    if pump.version == 0:
        await pump.step()
        assert trained == [50, 70]
    assert rewards == {"a": [50], "b": [70]}
    assert not pump._steps._preparation.computed
