"""A run that was killed goes on from its checkpoint, and loses at most what was in flight."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rigs.streaming.saving import SavingWorld, resumed, roll_out, saved
from rigs.streaming.world import World, raised

from megapatch import MisuseError
from megapatch.streaming import RolloutBuffer

TESTS = Path(__file__).parents[1]


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the lives are forked")
def test_killed_a_hundred_times(tmp_path):
    command = [sys.executable, "-m", "rigs.streaming.killed_runs", str(tmp_path), "100"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    kills, groups, versions, rollouts = map(int, done.stdout.split())
    assert kills == 100 and versions > 50  # and not always before the first save
    assert groups > 500 and rollouts > groups + 200  # those in flight are rolled out again


async def test_the_version_and_complete_groups_go_on():
    world = SavingWorld()
    pump = world.pump(generations_per_prompt=2, max_staleness=1)
    await world.put_each("abc", samples=2)
    await pump.step()
    other, resumed_pump, again = await resumed(await saved(pump), generations_per_prompt=2, max_staleness=1)
    assert resumed_pump.version == 1 and again == []
    assert list(other.buffer.samples()) == ["b0", "b1", "c0", "c1"]
    await resumed_pump.step()
    assert other.trained == [["b0", "b1"]] and resumed_pump.version == 2


async def test_no_rollout_begins_before_generation_has_the_weights_and_the_step_syncs_first():
    pump = SavingWorld().pump(version=3)
    world, pump, _ = await resumed(await saved(pump))
    rolling = asyncio.ensure_future(roll_out(world, pump, "a"))
    await asyncio.sleep(1)
    assert not pump.admitted and not len(world.buffer)
    await pump.step()
    await rolling
    assert world.called("stamp", "microbatch") == ["stamp 3", "microbatch a", "stamp 4"]


async def test_a_failed_step_is_undone_first_and_its_advantages_are_not_computed_again():
    computed = []

    async def advantages(data):
        computed.append(data[0])
        return [f"{data[0]}!"]

    world = await SavingWorld.of("a", {"before microbatch": "raise", "before give_back": "raise"})
    pump = world.pump(compute_advantages=advantages)
    assert await raised(pump.step()) and not world.buffer.samples()
    other, pump, _ = await resumed(await saved(pump), compute_advantages=advantages)
    assert world.called("give_back") == ["give_back a"]
    await pump.step()
    assert other.trained == [["a!"]] and computed == ["a"]


async def test_trained_groups_whose_clearing_failed_are_not_saved():
    world = await SavingWorld.of("ab", {"before clear": "raise"})
    pump = world.pump(max_staleness=1)
    assert await raised(pump.step())
    world, pump, _ = await resumed(await saved(pump), max_staleness=1)
    await pump.step()
    assert world.trained == [["b"]] and pump.version == 2


async def test_a_buffer_without_state_keeps_its_own():
    world = await World.of("ab")
    pump = world.pump(max_staleness=1)
    await pump.step()
    state = await saved(pump)
    assert "buffer" not in state
    other = World()
    other.buffer = world.buffer
    pump = other.pump(max_staleness=1)
    assert await pump.load_state_dict(state) == []
    await pump.step()
    assert other.trained == [["b"]] and pump.version == 2


@pytest.mark.parametrize("state", [{}, {"format": 2}, None])
async def test_another_format_is_refused(state):
    for load in (RolloutBuffer().load_state_dict, SavingWorld().pump().load_state_dict):
        with pytest.raises(MisuseError, match=r"has the format .*; expected 1"):
            await load(state) if load.__qualname__.startswith("TrainPump") else load(state)


async def test_loading_into_what_is_in_use_is_refused():
    world = await SavingWorld.of("a")
    pump = world.pump()
    state = await saved(pump)
    with pytest.raises(MisuseError, match="has had samples already"):
        await pump.load_state_dict(state)
    await pump.step()
    with pytest.raises(MisuseError, match="in use already"):
        await pump.load_state_dict(state)
    world = SavingWorld()
    pump = world.pump()
    async with pump.rollout("b"):
        with pytest.raises(MisuseError, match="in use already"):
            await pump.load_state_dict(state)
    with pytest.raises(MisuseError, match=r"has no load_state_dict\(\)"):
        await World().pump().load_state_dict(state)


async def test_neither_while_a_step_runs():
    pump = SavingWorld().pump()
    stepping = asyncio.ensure_future(pump.step())
    await asyncio.sleep(1)
    for call in (pump.state_dict(), pump.load_state_dict({})):
        with pytest.raises(MisuseError, match=r"while step\(\) of this pump is running"):
            await call
    stepping.cancel()


# ------------------------------------------------------------------------------------- rollouts in a saved state
async def failing(world, pump, group):
    async with pump.rollout(group):
        await world.put(group)
        raise ConnectionError


async def test_groups_in_flight_come_back_to_be_rolled_out_again():
    """Those that run, that have arrived in part, that wait; not those that a filter has dropped."""
    world = SavingWorld()
    pump = world.pump(generations_per_prompt=2, target_prompt_groups_per_step=2, max_staleness=1)
    await world.put("half", samples=1)
    await world.put("strange", samples=3)
    async with pump.rollout("filtered"):
        pass
    async with pump.rollout("done"):
        await world.put("done", samples=2)
    async with pump.rollout("partly"):
        await world.put("partly")
    assert await raised(failing(world, pump, "failed"))
    tasks = [asyncio.ensure_future(roll_out(world, pump, group, 99)) for group in ("runs", "waits")]
    await asyncio.sleep(1)
    other, _, again = await resumed(await saved(pump), generations_per_prompt=2)
    assert again == ["partly", "runs", "waits", "half", "strange", "failed"]
    assert list(other.buffer.samples()) == ["done0", "done1"]
    for task in tasks:
        task.cancel()


async def test_rollouts_that_wait_in_the_buffer_still_count():
    """With a fresh count too many would begin, and some could not be trained on."""
    world, begun = SavingWorld(), []
    settings = {"target_prompt_groups_per_step": 2, "max_staleness": 1}
    pump = world.pump(**settings)
    for group in "abc":
        await roll_out(world, pump, group)
    world, pump, _ = await resumed(await saved(pump), **settings)
    await pump.sync_weights()

    async def begin(group):
        async with pump.rollout(group):
            begun.append(group)
            await world.put(group)

    tasks = [asyncio.ensure_future(begin(group)) for group in "defg"]
    await asyncio.sleep(1)
    assert begun == ["d"]
    await pump.step()
    await asyncio.sleep(1)
    assert begun == ["d", "e", "f"] and world.trained == [["a", "b"]]
    tasks[-1].cancel()


async def test_a_rollout_keeps_the_version_of_its_weights():
    """One that is too old is evicted after the load as before it."""
    world = SavingWorld()
    pump = world.pump(version=5, max_staleness=2)
    world.generation_version = 5
    await roll_out(world, pump, "a")
    _, pump, _ = await resumed(await saved(pump), max_staleness=2)
    assert [rollout.version for rollout in pump._rollouts._rollouts.values()] == [5]


async def test_new_rollouts_have_the_version_of_the_state():
    """They are not taken for older ones, which training would wait for."""
    world, pump, _ = await resumed(await saved(SavingWorld().pump(version=3)), max_staleness=0)
    await pump.sync_weights()
    running = asyncio.ensure_future(roll_out(world, pump, "runs", 1e6))
    await asyncio.sleep(1)
    await world.put("is there", version=3)
    await asyncio.wait_for(pump.step(), 100)
    assert world.trained == [["is there"]]
    running.cancel()
