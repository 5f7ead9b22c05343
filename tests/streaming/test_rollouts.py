"""Rollouts begin as far ahead as they can still be trained on, and none that was begun is lost by waiting."""

from __future__ import annotations

import asyncio
import logging

import pytest
from rigs.streaming.rollouts import begun
from rigs.streaming.world import Fault, World, cancelled_after, failing_after, raised

from megapatch import MisuseError
from megapatch.streaming._groups import Group, Groups


# ------------------------------------------------------------------------------------------ how many
@pytest.mark.parametrize(("max_staleness", "first"), [(0, "ab"), (1, "abcd"), (2, "abcdef")])
@pytest.mark.parametrize("pick", ["weight_fifo", "ready_first"])
async def test_as_many_begin_as_can_be_trained_on(max_staleness, first, pick):
    world, pump, rollouts = await begun(max_staleness=max_staleness, pick=pick)
    assert "".join(rollouts.begun) == first
    await rollouts.end("a", "b")
    assert "".join(rollouts.begun) == first  # what waits in the buffer counts, too
    await pump.step()
    await asyncio.sleep(1)
    assert "".join(rollouts.begun) == "abcdefgh"[: len(first) + 2]
    assert world.trained == [["a", "b"]]


async def test_the_bound_is_of_optimizer_steps():
    settings = {"target_prompt_groups_per_step": 4, "train_global_batch_size": 2, "max_staleness": 1}
    world, pump, rollouts = await begun(**settings)
    assert "".join(rollouts.begun) == "abcd"
    await rollouts.end(*"abcd")
    await pump.step()
    await asyncio.sleep(1)
    assert world.trained == [["a", "b"], ["c", "d"]] and "".join(rollouts.begun) == "abcdefgh"


async def test_a_pump_that_begins_at_a_later_version_has_the_same_bound():
    _, _, rollouts = await begun(max_staleness=1, version=7)
    assert "".join(rollouts.begun) == "abcd"


async def test_none_begins_while_weights_are_synced():
    _, pump, rollouts = await begun(World({"before sync": lambda: asyncio.sleep(100)}), groups="")
    syncing = asyncio.ensure_future(pump.sync_weights())
    await asyncio.sleep(1)
    rollouts.begin("a")
    await asyncio.sleep(98)
    assert not rollouts.begun
    await syncing
    await asyncio.sleep(1)
    assert rollouts.begun == ["a"]


@pytest.mark.parametrize("how", ["fails", "is cancelled", "is dropped"])
async def test_another_begins_for_one_that_comes_to_nothing(how):
    _, pump, rollouts = await begun()
    stepping = asyncio.ensure_future(pump.step())
    await asyncio.sleep(1)
    if how == "fails":
        rollouts.ends["a"].set_exception(KeyError())
    elif how == "is cancelled":
        rollouts.tasks["a"].cancel()
    else:
        rollouts.ends["a"].set_result("dropped")
    await asyncio.sleep(1)
    assert "".join(rollouts.begun) == "abc"
    await rollouts.end("b", "c")
    await stepping
    rollouts.tasks["a"].cancelled() or rollouts.tasks["a"].exception()


async def test_another_begins_for_one_that_was_given_back_and_is_gone():
    world, pump, rollouts = await begun(World({"before microbatch": "raise"}))
    await rollouts.end("a", "b")
    assert isinstance(await raised(pump.step()), Fault)
    world.buffer.clear([Group("a", ("a",), 0)])  # as a filter does
    stepping = asyncio.ensure_future(pump.step())
    await asyncio.sleep(1)
    assert "".join(rollouts.begun) == "abc"
    await rollouts.end("c")
    await stepping
    assert world.trained == [["b", "c"]]


async def test_what_a_failed_one_has_left_is_dropped_before_it_begins_again():
    world, pump, _ = await begun(groups="", generations_per_prompt=2)

    async def roll_out(group, fails):
        async with pump.rollout(group):
            await world.put(f"{group}0", group_id=group)
            if fails:
                raise KeyError
            await world.put(f"{group}1", group_id=group)

    assert isinstance(await raised(roll_out("a", fails=True)), KeyError)
    again = asyncio.ensure_future(roll_out("a", fails=False))
    await asyncio.sleep(1)
    assert list(world.buffer.samples()) == ["a0"] and not again.done()
    world.plan["before clear"] = "raise"  # and this is done again
    assert await raised(pump.step())
    stepping = asyncio.ensure_future(pump.step())
    await again
    await roll_out("c", fails=False)
    await stepping
    assert world.trained == [["a0", "a1", "c0", "c1"]] and not len(world.buffer)


async def test_a_group_begins_once():
    world, pump, rollouts = await begun(groups="ab")
    told = "this group has begun already, and was not trained on yet"
    for group in "a", "a":
        with pytest.raises(MisuseError, match=told):
            async with pump.rollout(group):
                pass
    rollouts.begin("c")
    await asyncio.sleep(1)
    with pytest.raises(MisuseError, match=told):
        async with pump.rollout("c"):
            pass
    await rollouts.end("a", "b")
    await pump.step()
    await rollouts.end("c")
    async with pump.rollout("a"):  # in another epoch
        await world.put("a", version=1)
    await pump.step()
    assert world.trained == [["a", "b"], ["c", "a"]]


async def test_a_look_does_not_land_a_group_that_has_begun_again():
    """It had left nothing before the look, and is not in the buffer yet."""
    pump = World().pump()
    rollouts, nothing = pump._rollouts, Groups({}, pump._config, 0)
    async with pump.rollout("a"):
        pass
    ended, _ = rollouts.look_begins()
    async with pump.rollout("a"):
        rollouts.look_ended(ended, nothing)
        assert "1 rollouts in flight" in str(rollouts)
    rollouts.look_ended(rollouts.look_begins()[0], nothing)
    assert not str(rollouts)


async def test_one_that_ends_during_a_look_is_in_flight_until_the_next():
    pump = World().pump()
    rollouts, nothing = pump._rollouts, Groups({}, pump._config, 0)
    ended, _ = rollouts.look_begins()
    async with pump.rollout("a"):  # a filter drops its samples
        pass
    rollouts.look_ended(ended, nothing)
    assert "1 rollouts in flight" in str(rollouts)
    rollouts.look_ended(rollouts.look_begins()[0], nothing)
    assert not str(rollouts)


async def test_one_that_waits_to_begin_can_be_cancelled():
    _, pump, rollouts = await begun(groups="abc")
    rollouts.tasks["c"].cancel()
    await rollouts.end("a", "b")
    await pump.step()
    rollouts.begin("d", "e", "f")
    await asyncio.sleep(1)
    assert "".join(rollouts.begun) == "abde"


# ------------------------------------------------------------------------------------------ what is reported
async def test_the_first_eviction_is_a_warning(caplog):
    world = World()
    pump = world.pump(version=3)
    await world.put("old", version=1)
    await world.put("older", version=0)
    await world.put("new", version=3)
    await pump.step()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "training sees too many short ones" in record.getMessage()
    assert "pump.rollout(group_id)" in record.getMessage()


# ------------------------------------------------------------------------------------------ whose place is kept
@pytest.mark.parametrize(
    ("pick", "trained"),
    [
        ("weight_fifo", ["db", "ac", "fe"]),  # a and c have to be in the second step, or never
        ("ready_first", ["db", "fe"]),
    ],
)
async def test_what_is_slow(pick, trained):
    world, pump, rollouts = await begun(groups="abcd", max_staleness=1, pick=pick)
    training = asyncio.ensure_future(raised(pump.run(3)))
    await rollouts.end("d")
    await rollouts.end("b")
    rollouts.begin("e", "f")
    await asyncio.sleep(1)
    await rollouts.end("f")
    for slow in "eac" if pick == "ready_first" else "ace":
        await rollouts.end(slow)
    world.buffer.close()
    await training
    assert ["".join(step) for step in world.trained] == trained


async def test_a_slow_one_is_not_waited_for_before_it_has_to_be():
    world, pump, rollouts = await begun(groups="abcd", max_staleness=1)
    await rollouts.end("b", "c", "d")
    await pump.step()
    assert world.trained == [["b", "c"]]
    rollouts.begin("e")
    await asyncio.sleep(1)
    await rollouts.end("e")
    stepping = asyncio.ensure_future(pump.step())
    await asyncio.sleep(100)
    assert world.called("claim")[-1] == "claim d"  # the other place is kept for a
    await rollouts.end("a")
    await stepping
    assert world.trained[1] == ["d", "a"]


@pytest.mark.parametrize("ending", ["fails", "is dropped", "never ends"])
async def test_a_place_is_not_kept_for_one_that_does_not_come(ending):
    world, pump, rollouts = await begun(groups="ab")
    await rollouts.end("b")
    stepping = asyncio.ensure_future(raised(pump.step()))
    await asyncio.sleep(1)
    rollouts.begin("c")
    await asyncio.sleep(1)
    if ending == "never ends":
        rollouts.tasks["a"].cancel()  # its user decides
    elif ending == "fails":
        rollouts.ends["a"].set_exception(KeyError())
    else:
        await rollouts.end("a", how="dropped")
    await asyncio.sleep(1)
    await rollouts.end("c")
    assert await stepping is None
    assert world.trained == [["b", "c"]]
    await asyncio.wait(rollouts.tasks.values())
    rollouts.tasks["a"].cancelled() or rollouts.tasks["a"].exception()


async def test_a_closed_buffer_keeps_no_place():
    world, pump, _ = await begun(groups="a", max_staleness=1)
    await world.put_each("bc")
    await pump.step()
    await world.put_each("de", version=1)
    stepping = asyncio.ensure_future(pump.step())
    await asyncio.sleep(1)
    assert world.called("claim")[2:] == ["claim d"]  # the other place is that of a
    world.buffer.close()
    await stepping
    assert world.trained == [["b", "c"], ["d", "e"]]


@pytest.mark.parametrize("place", ["before microbatch", "after claim", "before finish"])
async def test_groups_of_a_failed_step_keep_their_places(place):
    world, pump, rollouts = await begun(max_staleness=1)
    world.plan[place] = failing_after(5)
    await rollouts.end("a", "b")
    assert await raised(pump.step())
    assert "".join(rollouts.begun) == "abcd"
    world.plan.clear()
    await pump.step()
    await asyncio.sleep(1)
    assert world.trained == [["a", "b"]] and "".join(rollouts.begun) == "abcdef"


async def test_a_cancelled_step_leaves_rollouts_alone():
    world, pump, rollouts = await begun()
    assert isinstance(await cancelled_after(3, pump.step(), times=1), asyncio.CancelledError)
    await rollouts.end("a", "b")
    await pump.step()
    assert world.trained == [["a", "b"]]
