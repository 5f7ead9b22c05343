"""Which group is trained on first, and whose place is kept for it while it is generated."""

from __future__ import annotations

import asyncio

import pytest
from rigs.streaming.rollouts import begun
from rigs.streaming.world import cancelled_after, failing_after, raised

from megapatch.streaming import EmptyStepError


@pytest.mark.parametrize(
    ("pick", "trained"),
    [
        ("weight_fifo", ["db", "ac", "fe"]),  # a and c have to be in the second step, or never
        ("ready_first", ["db", "fe"]),
        ("windowed", ["db", "fe"]),
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
    for slow in "eac" if pick == "ready_first" or pick == "windowed" else "ace":
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
    for name in "bc":
        await world.put(name)
    await pump.step()
    for name in "de":
        await world.put(name, version=1)
    stepping = asyncio.ensure_future(pump.step())
    await asyncio.sleep(1)
    assert world.called("claim")[2:] == ["claim d"]  # the other place is that of a
    world.buffer.close()
    await stepping
    assert world.trained == [["b", "c"], ["d", "e"]]


async def test_a_wait_for_one_in_flight_is_told(caplog):
    _, pump, _ = await begun(groups="a", rollout_timeout=700)
    error = await raised(pump.step())
    assert isinstance(error, EmptyStepError)
    assert "1 rollouts in flight, the oldest for 601 s" in caplog.text


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
