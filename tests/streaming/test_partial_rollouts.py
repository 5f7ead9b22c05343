"""Samples whose generation went on across weight syncs: their tokens have several versions."""

from __future__ import annotations

import asyncio

import pytest
from rigs.streaming.world import World

from megapatch import MisuseError
from megapatch.streaming import Group, StalenessSampler


def sampler(**settings):
    return StalenessSampler(**{"max_staleness": 1, "generations_per_prompt": 1, **settings})


def of(*runs, group="a"):
    return {"group_id": group, "weight_versions": list(runs)}


@pytest.mark.parametrize(
    ("runs", "oldest"),
    [([(3, 10)], 3), ([(2, 0), (3, 10), (5, 0)], 3), ([(2, 1), (4, 9)], 2), ([(4, 5), (2, 5), (3, 5)], 2)],
)
def test_the_version_that_counts(runs, oldest):
    (group,) = sampler(max_staleness=2).eligible({0: of(*runs)}, 4)
    assert group == Group("a", (0,), oldest)


def test_a_group_is_as_old_as_its_oldest_sample():
    samples = {0: of((4, 9)), 1: of((2, 1), (4, 1))}
    two = {"generations_per_prompt": 2, "max_staleness": 1}
    assert sampler(**two).evict(samples, 4) == [Group("a", (0, 1), 2)]


def test_its_newest_token_must_not_be_from_the_future():
    samples = {0: of((3, 99), (5, 1))}
    assert not sampler().eligible(samples, 4)
    assert sampler(max_staleness=2).eligible(samples, 5)


async def test_a_rollout_goes_on_across_syncs():
    """As docs/streaming.md has it: an engine ends a request early when it is paused."""
    world, runs = World(), []
    pump = world.pump(max_staleness=2)

    async def roll_out():
        async with pump.rollout("long"):
            for _ in range(3):
                await pump.rollouts_permitted()
                runs.append((world.generation_version, 10))
                await asyncio.sleep(10)
            await world.buffer.put("long", {"group_id": "long", "weight_versions": runs}, "long")

    rolling = asyncio.ensure_future(roll_out())
    for version in range(2):
        await asyncio.sleep(5)
        await world.put(f"short{version}", version=version)
        await pump.step()
        await asyncio.sleep(5)
    await rolling
    assert runs == [(0, 10), (1, 10), (2, 10)]
    await pump.step()
    assert world.trained == [["short0"], ["short1"], ["long"]]


async def test_late_duplicates_are_known_by_their_oldest_token():
    world = World()
    pump = world.pump(version=1, max_staleness=1)
    await world.buffer.put("a", of((0, 1), (1, 1)), "a")
    await pump.step()
    await world.buffer.put("a", of((0, 2)), "a")
    assert world.buffer.late_duplicates == 1
    await world.buffer.put("a", of((1, 2)), "a")
    assert len(world.buffer) == 1


@pytest.mark.parametrize("runs", [[], [(1,)], [(1, 0)], [("1", 2)], [(1.5, 2)], 7, "12", [(0, 1), (1, -1)]])
def test_what_are_no_versions_of_tokens(runs):
    told = r"^sample 'a' has weight_versions=.* in its tag; expected a list of pairs"
    with pytest.raises(MisuseError, match=told):
        sampler().eligible({"a": {"group_id": "a", "weight_versions": runs}}, 1)
