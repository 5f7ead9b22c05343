"""A run that was killed goes on from its checkpoint, and loses at most what was in flight."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rigs.streaming.saving import SavingWorld, resumed, roll_out, saved
from rigs.streaming.world import Streaming, World, raised

from megapatch import MisuseError
from megapatch.streaming import Group, RolloutBuffer

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

    world = SavingWorld({"before microbatch": "raise", "before give_back": "raise"})
    await world.put("a")
    pump = world.pump(compute_advantages=advantages)
    assert await raised(pump.step()) and not world.buffer.samples()
    other, pump, _ = await resumed(await saved(pump), compute_advantages=advantages)
    assert world.called("give_back") == ["give_back a"]
    await pump.step()
    assert other.trained == [["a!"]] and computed == ["a"]


async def test_trained_groups_whose_clearing_failed_are_not_saved():
    world = SavingWorld({"before clear": "raise"})
    await world.put_each("ab")
    pump = world.pump(max_staleness=1)
    assert await raised(pump.step())
    world, pump, _ = await resumed(await saved(pump), max_staleness=1)
    await pump.step()
    assert world.trained == [["b"]] and pump.version == 2


async def test_late_duplicates_are_still_known():
    world = SavingWorld()
    await world.put("a")
    pump = world.pump()
    await pump.step()
    world, _, _ = await resumed(await saved(pump))
    await world.put("a")
    assert world.buffer.late_duplicates == 1 and not len(world.buffer)


async def test_a_buffer_without_state_keeps_its_own():
    world = World()
    await world.put_each("ab")
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
    world = SavingWorld()
    await world.put("a")
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
    tasks = [asyncio.ensure_future(roll_out(world, pump, group, 99)) for group in ("runs", "waits")]
    await asyncio.sleep(1)
    other, _, again = await resumed(await saved(pump), generations_per_prompt=2)
    assert again == ["partly", "runs", "waits", "half", "strange"]
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


async def test_durations_are_those_of_before():
    world = SavingWorld()
    pump = world.pump(target_prompt_groups_per_step=2)
    await asyncio.gather(roll_out(world, pump, "first", 4.0), roll_out(world, pump, "second", 2.0))
    heard = Streaming()
    state = await saved(pump)
    world, pump, _ = await resumed(state, target_prompt_groups_per_step=2, logger=heard)
    await pump.step()
    assert world.trained == [["second", "first"]]
    assert heard[0]["trained_rollout_seconds"] == pytest.approx(3.0) and heard[0]["rollouts_begun"] == 0


async def test_the_seconds_of_a_rollout_are_those_up_to_its_end():
    """However much time there was between its end, the save and the load."""
    world = SavingWorld()
    pump = world.pump(max_staleness=1)
    await asyncio.sleep(7)
    await roll_out(world, pump, "a", 2.0)
    await asyncio.sleep(11)
    tasks = [asyncio.ensure_future(roll_out(world, pump, group, 10.0)) for group in ("runs", "waits")]
    await asyncio.sleep(3)
    state = await saved(pump)
    assert state["rollouts"] == [("a", 2.0, False), ("runs", 3.0, True), ("waits", 0.0, True)]
    for task in tasks:
        task.cancel()
    world, pump, again = await resumed(state)
    assert again == ["runs", "waits"]
    await asyncio.sleep(5)
    assert (await saved(pump))["rollouts"] == [("a", 2.0, False)]


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


async def test_a_group_of_which_one_part_runs_and_another_waits_comes_back_once():
    world = SavingWorld({"before sync": "raise"})
    pump = world.pump(generations_per_prompt=2)
    parts = [asyncio.ensure_future(roll_out(world, pump, "a", 99))]
    await asyncio.sleep(1)
    assert await raised(pump.sync_weights())
    parts.append(asyncio.ensure_future(roll_out(world, pump, "a", 99)))
    await asyncio.sleep(1)
    _, _, again = await resumed(await saved(pump), generations_per_prompt=2)
    assert again == ["a"]
    for part in parts:
        part.cancel()


async def test_a_group_that_somebody_else_has_taken_does_not_come_back():
    async def take():
        world.buffer.clear([Group("a", ("a",), 0)])

    world = SavingWorld({"before claim": take})
    pump = world.pump()
    async with pump.rollout("a"):
        await world.put("a")
        assert isinstance(await raised(pump.step()), MisuseError)
        _, _, again = await resumed(await saved(pump))
    assert again == []


async def test_a_group_between_two_attempts_comes_back():
    world = SavingWorld()
    pump = world.pump()

    async def fail():
        await asyncio.sleep(1)
        raise ConnectionError

    rolling = asyncio.ensure_future(raised(pump.roll_out("a", fail)))
    world.plan["before state"] = lambda: asyncio.sleep(3)
    world.plan["before samples"] = lambda: asyncio.sleep(5)  # the pump looks for what the attempt has left
    state = await saved(pump)
    assert "before samples" in world.reached and "after samples" not in world.reached
    assert isinstance(await rolling, ConnectionError)
    _, _, again = await resumed(state)
    assert again == ["a"]
    assert not (await saved(pump))["rollouts"]  # it has failed for good


async def test_rollouts_that_were_aborted_do_not_come_back():
    world = SavingWorld()
    settings = {"generations_per_prompt": 2, "oversampled_prompt_groups": 1, "abort_stale_rollouts": True}
    pump = world.pump(**settings)

    async def hang():
        async with pump.rollout("slow"):
            await world.put("slow")
            await asyncio.sleep(1e6)

    hanging = asyncio.ensure_future(hang())
    await asyncio.sleep(1)
    await world.put("quick", samples=2)
    await pump.step()
    await hanging
    assert len(world.buffer) == 1
    other, _, again = await resumed(await saved(pump), **settings)
    assert again == [] and not len(other.buffer)
