"""The pump is cancelled: calls are waited for, what was done is undone, and no failure gets lost."""

from __future__ import annotations

import asyncio
import logging
import sys

import pytest
from rigs.streaming.world import Fault, World, cancelled_after, failing_after, raised

from megapatch.streaming import RolloutBuffer

STEP = ["claim", "prepare", "advantages", "begin", "microbatch", "finish", "clear"]
UNDO = ["abort", "give_back"]


def a_step(world):
    async def advantages(data):
        return await world.do("advantages", lambda: data)

    return world.pump(refresh_policy_logprobs=True, compute_advantages=advantages).step()


@pytest.mark.parametrize("call", STEP + UNDO)
async def test_a_call_is_waited_for_even_when_cancelled(call):
    world = World({f"before {call}": lambda: asyncio.sleep(10)})
    if call in UNDO:
        world.plan["before microbatch"] = "raise"
    await world.put("a")
    assert isinstance(await cancelled_after(1, a_step(world)), asyncio.CancelledError)
    assert f"after {call}" in world.reached
    assert asyncio.get_running_loop().time() == 10


async def test_an_eviction_is_waited_for_even_when_cancelled():
    world = await World.of(["stale"], {"before clear": lambda: asyncio.sleep(10)}, version=0)
    assert isinstance(await cancelled_after(1, world.pump(version=1).step()), asyncio.CancelledError)
    assert world.called() == ["clear stale"] and not len(world.buffer)


@pytest.mark.parametrize("call", ["abort", "give_back", "clear"])
async def test_what_the_next_step_does_again_is_waited_for(call):
    world = World({f"before {call}": "raise"})
    if call in UNDO:
        world.plan["before microbatch"] = "raise"
    await world.put("a")
    pump = world.pump()
    assert isinstance(await raised(pump.step()), Fault)
    world.plan[f"before {call}"] = lambda: asyncio.sleep(10)
    world.reached.clear()
    assert isinstance(await cancelled_after(1, pump.step()), asyncio.CancelledError)
    assert world.reached == [f"before {call}", f"after {call}"]
    world.plan.clear()
    await pump.step()
    assert world.trained == [["a"]] and not len(world.buffer)


async def test_the_next_step_aborts_before_it_gives_back():
    """While gradients of samples may still be there, the samples are for nobody else."""
    world = await World.of("a", {f"before {call}": "raise" for call in ("microbatch", *UNDO)})
    pump = world.pump()
    assert isinstance(await raised(pump.step()), Fault)
    world.plan["before abort"] = "raise"
    world.calls.clear()
    assert str(await raised(pump.step())) == "before abort"
    assert world.called() == [] and not world.buffer.samples()
    await pump.step()
    assert world.called()[:2] == ["abort", "give_back a"]


# ------------------------------------------------------------------------------------------ nothing is hidden
@pytest.mark.parametrize("call", ["claim", "prepare", "advantages", "begin", "finish", "clear"])
async def test_the_failure_of_a_call_that_was_waited_for_is_the_cause(call):
    world = await World.of("a", {f"before {call}": failing_after(10)})
    error = await cancelled_after(1, a_step(world))
    assert isinstance(error, asyncio.CancelledError)
    assert isinstance(error.__cause__, Fault)


async def test_a_failure_whose_undoing_is_cancelled_is_still_to_be_seen():
    world = await World.of("a", {"before microbatch": "raise", "before abort": lambda: asyncio.sleep(10)})
    error = await cancelled_after(1, world.pump().step())
    assert isinstance(error, asyncio.CancelledError)
    assert isinstance(error.__context__, Fault) and not error.__suppress_context__
    assert world.called()[-2:] == ["abort", "give_back a"]


async def test_a_microbatch_that_fails_when_the_step_was_cancelled_is_told(caplog):
    world = await World.of("a", {"before microbatch": failing_after(10)})
    error = await cancelled_after(1, world.pump().step(), times=1)
    assert isinstance(error, asyncio.CancelledError)
    told = "train_microbatch() failed: Fault: the reason"
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and record.getMessage().startswith(f"{told} (after CancelledError")
    assert isinstance(record.exc_info[1], Fault)
    assert sys.version_info < (3, 11) or error.__notes__ == [told]


async def test_a_trainer_whose_own_abort_was_cancelled(caplog):
    """As when its connection is closed. Nobody has cancelled the pump."""

    async def cancelled():
        raise asyncio.CancelledError

    world = await World.of("a", {"before microbatch": "raise", "before abort": cancelled})
    assert isinstance(await raised(world.pump().step()), Fault)
    assert world.called()[-1] == "give_back a"
    assert (
        "abort failed, too; the next step repeats it: MegapatchError: World.abort_train_step() was cancelled"
        in caplog.text
    )


@pytest.mark.parametrize("call", ["sync", "stamp"])
async def test_a_rollout_begins_right_after_a_cancelled_sync_that_succeeded(call):
    """There is no next step that would let it in: its prompt group is what that step would wait for."""
    world = World({f"before {call}": lambda: asyncio.sleep(10)})
    pump = world.pump(max_staleness=0)
    async with pump.rollout("a"):
        await world.put("a")
    assert isinstance(await cancelled_after(1, pump.step()), asyncio.CancelledError)

    async def begin():
        async with pump.rollout("b"):
            await world.put("b", version=1)

    await asyncio.wait_for(begin(), 1)
    for _ in range(2):  # the first ends the step that was cancelled
        await pump.step()
    assert world.trained == [["a"], ["b"]]


# ------------------------------------------------------------------------------------------ nothing is left over
async def others():
    await asyncio.sleep(1)
    return asyncio.all_tasks() - {asyncio.current_task()}


async def test_no_task_goes_on_after_a_wait_that_was_given_up():
    world = World()
    assert await cancelled_after(1, world.pump().step())
    assert world.called("wait") == ["wait"] and not await others()


async def test_a_buffer_that_fails_when_it_is_no_longer_waited_for():
    """asyncio would complain of a failure that nobody has seen, and the fixture of all these tests of that."""

    class Failing(RolloutBuffer):
        async def wait_for_change(self, seen):
            try:
                await super().wait_for_change(seen)
            except asyncio.CancelledError:
                raise Fault from None

    world = World()
    world.buffer = Failing()
    assert isinstance(await cancelled_after(1, world.pump().step()), asyncio.CancelledError)
    assert not await others()
