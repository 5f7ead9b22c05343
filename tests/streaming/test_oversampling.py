"""More rollouts than can be trained on, of which the first to end are; and fewer at a time."""

from __future__ import annotations

import asyncio

import pytest
from rigs.streaming.rollout_bias import mean, simulate
from rigs.streaming.rollouts import begun
from rigs.streaming.world import run


@pytest.mark.parametrize(("max_staleness", "first"), [(0, "abc"), (1, "abcde")])
@pytest.mark.parametrize("pick", ["weight_fifo", "ready_first"])
async def test_more_begin(max_staleness, first, pick):
    _, _, rollouts = await begun(max_staleness=max_staleness, pick=pick, oversampled_prompt_groups=1)
    assert "".join(rollouts.begun) == first


async def test_the_first_to_end_are_trained_on_and_the_last_is_dropped_in_silence(caplog):
    world, pump, rollouts = await begun(groups="abcdefg", oversampled_prompt_groups=1)
    await rollouts.end("c", "b")
    await pump.step()
    await asyncio.sleep(1)
    assert "".join(rollouts.begun) == "abcde"  # a still has its place among them
    await rollouts.end("a")
    await rollouts.end("d", "e")
    await pump.step()
    await asyncio.sleep(1)
    assert world.trained == [["c", "b"], ["d", "e"]] and not len(world.buffer)
    assert "".join(rollouts.begun) == "abcdefg"
    assert not caplog.records


async def test_places_are_kept_for_all_but_so_many():
    """Of a, b and e, which have to be in the second step or never, one may be lost; f and g could wait."""
    world, pump, rollouts = await begun(max_staleness=1, oversampled_prompt_groups=1)
    await rollouts.end("c", "d")
    await pump.step()
    await asyncio.sleep(1)
    assert "".join(rollouts.begun) == "abcdefg"
    stepping = asyncio.ensure_future(pump.step())
    await rollouts.end("f", "g")
    assert world.called("claim") == ["claim c", "claim d"]
    await rollouts.end("e")
    assert world.called("claim")[2:] == ["claim e"]
    await rollouts.end("a")
    await stepping
    await rollouts.end("b")
    await pump.step()
    assert ["".join(step) for step in world.trained] == ["cd", "ea", "fg"] and not len(world.buffer)


async def test_one_place_is_not_kept():
    """For a and b, which have to be in the second step or never, there is one place; the other is for f."""
    world, pump, rollouts = await begun(max_staleness=1, oversampled_prompt_groups=1)
    await rollouts.end("c", "d")
    await pump.step()
    rollouts.tasks["e"].cancel()
    await asyncio.sleep(1)
    stepping = asyncio.ensure_future(pump.step())
    await rollouts.end("f", "g")
    assert world.called("claim")[2:] == ["claim f"]
    await rollouts.end("b")
    await stepping
    assert ["".join(step) for step in world.trained] == ["cd", "fb"]


def test_steps_are_shorter_and_so_are_the_rollouts_in_them():
    """The page has these numbers, beside those without."""
    more = run(simulate("weight_fifo", 0, oversampled_prompt_groups=4))
    assert more.seconds_per_step == pytest.approx(5.7, abs=0.15)
    assert mean(more.trained) == pytest.approx(2.0, abs=0.15)
    assert more.thrown_away == pytest.approx(0.15, abs=0.015)


@pytest.mark.parametrize("pick", ["weight_fifo", "windowed"])
async def test_at_most_so_many_run_at_a_time(pick):
    world, pump, rollouts = await begun(max_staleness=1, pick=pick, max_rollouts_in_flight=3)
    assert "".join(rollouts.begun) == "abc"
    await rollouts.end("b")
    assert "".join(rollouts.begun) == "abcd"
    rollouts.tasks["a"].cancel()
    await asyncio.sleep(1)
    assert "".join(rollouts.begun) == "abcde"
    await rollouts.end("d", "c")
    await pump.step()
    assert world.trained == [["b", "d"]]


async def test_parts_of_a_group_count_once():
    _, pump, rollouts = await begun(groups="", max_staleness=1, max_rollouts_in_flight=1)
    async with pump.rollout("a"), pump.rollout("a"):
        rollouts.begin("b")
        await asyncio.sleep(1)
        assert not rollouts.begun
    await asyncio.sleep(1)
    assert rollouts.begun == ["b"]
