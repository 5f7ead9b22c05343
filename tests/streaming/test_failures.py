"""Something fails, or the pump is cancelled, at any await of a step: what is undone, and what comes next."""

from __future__ import annotations

import asyncio
import logging
import sys

import pytest
from rigs.streaming.world import Fault, World, failing_after, raised

from megapatch import MegapatchError
from megapatch.errors import MisuseError
from megapatch.streaming import EmptyStepError, StreamingConfig, TrainPump
from megapatch.streaming._calls import MicrobatchQueue, SequentialCalls, Timer, Watchdog, perform

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
    world = await World.of("a", version=5)
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
    world = await World.of("a", {"before microbatch": failing_after(10)})
    assert isinstance(await raised(world.pump(target_prompt_groups_per_step=2).step()), Fault)
    assert world.called() == ["claim a", "begin", "abort", "give_back a"]


async def test_after_a_failing_microbatch_no_other_is_made():
    world = await World.of("abcd", {"before microbatch": failing_after(10)})
    pump = world.pump(target_prompt_groups_per_step=4)
    assert isinstance(await raised(pump.step()), Fault)
    assert world.reached.count("before microbatch") == 1
    assert world.called() == [
        *["claim a", "begin", "claim b", "abort", "give_back a b"],
    ]


async def test_a_call_under_way_is_waited_for_and_the_queued_ones_are_not_made():
    world = await World.of("abc", {"before microbatch": lambda: asyncio.sleep(10)})
    pump = world.pump(target_prompt_groups_per_step=3)
    task = asyncio.ensure_future(pump.step())
    await asyncio.sleep(1)
    for _ in range(3):  # however often
        task.cancel()
        await asyncio.sleep(1)
        assert not task.done()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.called() == [*["claim a", "begin", "claim b", "microbatch a", "abort", "give_back a b"]]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.timeout() is from Python 3.11 on")
async def test_a_timeout_is_still_one():
    world = await World.of("a", {"before finish": lambda: asyncio.sleep(10)})
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
    await world.put_each("ab")
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


# -------------------------------------------------------------------------- a failure while another is under way
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("undo", ["abort", "give_back"])
async def test_what_cannot_be_undone_is_undone_by_the_next_step(undo, when, caplog):
    world = await World.of("a", {"before microbatch": "raise", f"{when} {undo}": "raise"})
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


@pytest.mark.parametrize("when", ["before", "after"])
async def test_what_was_trained_on_and_not_cleared_is_not_trained_on_twice(when):
    world = await World.of("abcd", {f"{when} clear": "raise"})
    pump = world.pump(target_prompt_groups_per_step=4, train_global_batch_size=2, max_staleness=1)
    assert isinstance(await raised(pump.step()), Fault)
    assert (pump.version, world.called()[-1]) == (1, "clear a b" if when == "after" else "finish")
    await pump.step()  # the optimizer step that is left to do, and the sync
    assert world.trained == [["a", "b"], ["c", "d"]]
    assert world.called("clear", "sync")[-3:] == ["clear a b", "clear c d", "sync 2"]


async def test_a_step_that_failed_between_its_optimizer_steps_goes_on_there():
    world = await World.of("abcd")
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
    world = await World.of("a")
    pump = world.pump(target_prompt_groups_per_step=2)
    world.buffer.close()
    assert isinstance(await raised(pump.step()), EmptyStepError)
    world.buffer._closed = False
    await world.put("b")
    await pump.step()
    assert world.trained == [["a", "b"]]


# ------------------------------------------------------------------------------------------ which is the first
async def failed_twice(claim):
    """A microbatch fails after a while, then the claim under way as planned; return the world and the error."""
    world = await World.of("a", {"before microbatch": failing_after(10)})
    await world.put("b")

    async def late():
        world.plan["before claim"] = claim

    world.plan["after begin"] = late
    return world, await raised(world.pump(target_prompt_groups_per_step=2).step())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
async def test_a_microbatch_that_failed_first_is_raised_and_the_later_failure_is_a_note():
    async def later():
        await asyncio.sleep(50)
        raise KeyError("b is gone")

    world, error = await failed_twice(later)
    assert isinstance(error, Fault) and str(error) == "the reason"
    assert error.__notes__ == ["the pump failed, too: KeyError: 'b is gone'"]
    assert world.called() == ["claim a", "begin", "abort", "give_back a b"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
async def test_a_microbatch_that_failed_later_is_a_note():
    _, error = await failed_twice("raise")
    assert str(error) == "before claim"
    assert error.__notes__ == ["train_microbatch() failed: Fault: the reason"]


async def test_a_cancellation_is_raised_also_after_a_microbatch_failed():
    world = await World.of("a", {"before microbatch": failing_after(10)})
    await world.put("b")

    async def late():
        world.plan["before claim"] = lambda: asyncio.sleep(50)

    world.plan["after begin"] = late
    task = asyncio.ensure_future(raised(world.pump(target_prompt_groups_per_step=2).step()))
    await asyncio.sleep(20)
    task.cancel()
    assert isinstance(await task, asyncio.CancelledError)


async def test_the_failure_of_a_later_call_is_found_behind_one_that_went_well():
    async def calls(trainer, method, data, unless):
        if data == "bad":
            raise ZeroDivisionError

    queue = MicrobatchQueue(calls, None)
    queue.put("good")
    queue.put("bad")
    await asyncio.sleep(1)
    assert isinstance(queue.failure, ZeroDivisionError)


async def test_a_remote_method_needs_no_thread():
    class Method:
        async def remote(self, *args):
            return args

    assert await perform(Method(), "data", thread=object(), data=True) == ("data",)


async def test_data_of_a_trainers_call_is_not_looked_into():
    class Refreshing:
        async def prepare_logprobs(self):
            return [print, lambda: None]

    calls = SequentialCalls(Timer(), Watchdog())
    assert len(await calls(Refreshing(), "prepare_logprobs", data=True)) == 2
    with pytest.raises(MisuseError, match="in which nothing may have run"):
        await calls(Refreshing(), "prepare_logprobs")
