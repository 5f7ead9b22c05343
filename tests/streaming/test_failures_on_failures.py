"""Something fails while another failure is under way: which one is raised, and what the next step repairs."""

from __future__ import annotations

import asyncio
import logging
import sys

import pytest
from rigs.streaming.world import Fault, World, failing_after, raised

from megapatch import MegapatchError
from megapatch.streaming import EmptyStepError


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("undo", ["abort", "give_back"])
async def test_what_cannot_be_undone_is_undone_by_the_next_step(undo, when, caplog):
    world = World({"before microbatch": "raise", f"{when} {undo}": "raise"})
    await world.put("a")
    pump = world.pump()
    with caplog.at_level(logging.ERROR, logger="megapatch"):
        error = await raised(pump.step())
    assert isinstance(error, Fault) and str(error) == "before microbatch"
    assert f"{undo} failed, too" in caplog.text
    assert sys.version_info < (3, 11) or f"{when} {undo}" in error.__notes__[0]
    assert ("a" in world.buffer.samples()) == (undo == "abort" or when == "after")
    if undo == "abort":  # gradients may be there still
        with pytest.raises(
            MegapatchError, match=r"sync_weights\(\): a train step is open because its abort failed"
        ):
            await pump.sync_weights()
        assert pump.admitted
    world.calls.clear()
    await pump.step()
    assert world.called()[0] == ("abort" if undo == "abort" else "give_back a")
    assert world.trained == [["a"]]


async def test_the_next_step_does_not_begin_while_the_old_one_cannot_be_aborted():
    world = World({"before microbatch": "raise", "before abort": "raise"})
    await world.put("a")
    pump = world.pump()
    assert await raised(pump.step())
    world.plan["before abort"] = "raise"
    assert str(await raised(pump.step())) == "before abort"
    assert world.called("begin") == ["begin"]
    await pump.step()
    assert world.trained == [["a"]]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_what_was_trained_on_and_not_cleared_is_not_trained_on_twice(when):
    world = World({f"{when} clear": "raise"})
    for name in "abcd":
        await world.put(name)
    pump = world.pump(target_prompt_groups_per_step=4, train_global_batch_size=2, max_staleness=1)
    assert isinstance(await raised(pump.step()), Fault)
    assert (pump.version, world.called()[-1]) == (1, "clear a b" if when == "after" else "finish")
    await pump.step()  # the optimizer step that is left to do, and the sync
    assert world.trained == [["a", "b"], ["c", "d"]]
    assert world.called("clear", "sync")[-3:] == ["clear a b", "clear c d", "sync 2"]


async def test_a_step_that_failed_between_its_optimizer_steps_goes_on_there():
    world = World()
    for name in "abcd":
        await world.put(name)
    pump = world.pump(target_prompt_groups_per_step=4, train_global_batch_size=2, max_staleness=1)

    async def fail_in_the_second():
        if pump.version == 1:
            world.plan.clear()
            raise Fault

    world.plan["before microbatch"] = fail_in_the_second
    assert isinstance(await raised(pump.step()), Fault)
    assert world.trained == [["a", "b"]] and not world.called("sync")
    await pump.step()
    assert world.trained == [["a", "b"], ["c", "d"]]
    assert world.called("sync", "stamp") == ["sync 2", "stamp 2"]


async def test_an_empty_step_can_be_tried_again():
    world = World()
    await world.put("a")
    pump = world.pump(target_prompt_groups_per_step=2, rollout_timeout=10)
    assert isinstance(await raised(pump.step()), EmptyStepError)
    await world.put("b")
    await pump.step()
    assert world.trained == [["a", "b"]]


# ------------------------------------------------------------------------------------------ which is the first
@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
async def test_a_microbatch_that_failed_first_is_raised_and_the_later_failure_is_a_note():
    world = World({"before microbatch": failing_after(10)})
    await world.put("a")
    await world.put("b")

    async def late():
        world.plan["before claim"] = later

    async def later():
        await asyncio.sleep(50)
        raise KeyError("b is gone")

    world.plan["after begin"] = late
    error = await raised(world.pump(target_prompt_groups_per_step=2).step())
    assert isinstance(error, Fault) and str(error) == "the reason"
    assert error.__notes__ == ["the pump failed, too: KeyError: 'b is gone'"]
    assert world.called() == ["claim a", "begin", "abort", "give_back a b"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
async def test_a_microbatch_that_failed_later_is_a_note():
    world = World({"before microbatch": failing_after(10)})
    await world.put("a")
    await world.put("b")

    async def late():
        world.plan["before claim"] = "raise"

    world.plan["after begin"] = late
    error = await raised(world.pump(target_prompt_groups_per_step=2).step())
    assert str(error) == "before claim"
    assert error.__notes__ == ["train_microbatch() failed: Fault: the reason"]


async def test_a_cancellation_is_raised_also_after_a_microbatch_failed():
    world = World({"before microbatch": failing_after(10)})
    await world.put("a")
    await world.put("b")

    async def late():
        world.plan["before claim"] = lambda: asyncio.sleep(50)

    world.plan["after begin"] = late
    task = asyncio.ensure_future(raised(world.pump(target_prompt_groups_per_step=2).step()))
    await asyncio.sleep(20)
    task.cancel()
    assert isinstance(await task, asyncio.CancelledError)
