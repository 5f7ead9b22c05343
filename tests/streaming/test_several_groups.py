"""Several prompt groups a microbatch call, for trainers that cannot run on one alone."""

from __future__ import annotations

import asyncio

import pytest
from rigs.streaming.world import World, raised

from megapatch import MisuseError
from megapatch.streaming import StreamingConfig


@pytest.mark.parametrize(
    ("groups", "each", "calls"),
    [(6, 1, [1] * 6), (6, 2, [2, 2, 2]), (7, 2, [2, 2, 3]), (7, 4, [7]), (11, 4, [4, 7]), (5, 5, [5])],
)
def test_no_call_has_fewer_and_none_is_left_over(groups, each, calls):
    config = StreamingConfig(
        generations_per_prompt=1, target_prompt_groups_per_step=groups, prompt_groups_per_microbatch=each
    )
    assert config.prompt_groups_by_microbatch == calls


async def test_the_trainer_gets_lists_and_the_last_one_has_the_remainder():
    world, got = World(), []
    await world.put_each("abcde", samples=2)
    original = world.train_microbatch

    async def train_microbatch(data):
        got.append(data)
        await original(data)

    world.train_microbatch = train_microbatch
    settings = {"target_prompt_groups_per_step": 5, "prompt_groups_per_microbatch": 2}
    await world.pump(generations_per_prompt=2, **settings).step()
    assert got == [[["a0", "a1"], ["b0", "b1"]], [["c0", "c1"], ["d0", "d1"], ["e0", "e1"]]]
    assert world.called("begin", "microbatch", "finish", "clear") == [
        *["begin", "microbatch a0 a1 b0 b1", "microbatch c0 c1 d0 d1 e0 e1"],
        *["finish", "clear a b c d e"],
    ]


async def test_none_is_claimed_before_a_call_has_all_of_its_groups():
    """A better one may come until then: here one from older weights."""
    world = await World.of(["new"], version=1)
    settings = {"target_prompt_groups_per_step": 2, "prompt_groups_per_microbatch": 2, "max_staleness": 1}
    stepping = asyncio.ensure_future(world.pump(version=1, **settings).step())
    await asyncio.sleep(1)
    assert not world.called()
    await world.put("old", version=0)
    await stepping
    assert world.trained == [["old", "new"]]


async def test_logprobs_take_a_calls_groups_together_and_advantages_one_by_one():
    world, seen = World(), []
    await world.put_each("abcd")

    async def advantages(data):
        seen.append(data)
        return [f"{key}!" for key in data]

    settings = {"target_prompt_groups_per_step": 4, "prompt_groups_per_microbatch": 2}
    pump = world.pump(refresh_policy_logprobs=True, compute_advantages=advantages, **settings)
    await pump.step()
    assert world.called("prepare", "microbatch") == [
        *["prepare a b", "microbatch a! b!", "prepare c d", "microbatch c! d!"]
    ]
    assert seen == [["a"], ["b"], ["c"], ["d"]]


async def test_advantages_of_a_group_that_is_trained_on_no_more_are_forgotten():
    """It is evicted once its weights are too old; the buffer does not say so."""
    world = await World.of("a", {"before microbatch": "raise"}, version=0)

    async def advantages(data):  # a plain function would run in a thread, on real time
        return data

    pump = world.pump(max_staleness=1, compute_advantages=advantages)
    assert await raised(pump.step())
    (group,) = pump._steps.computed
    world.buffer.clear([group])
    for version, kept in enumerate([1, 0]):
        assert (pump.version, len(pump._steps.computed)) == (version, 1)
        await world.put(f"b{version}", version=version)
        await pump.step()
        assert len(pump._steps.computed) == kept


@pytest.mark.parametrize("returned", [["one"], None, "ab"])
async def test_a_trainer_that_returns_something_else_for_its_list(returned):
    world = World()
    for name in "ab" if returned != "ab" else "abc":
        await world.put(name)

    async def prepare_logprobs(data, **which):
        return returned

    world.prepare_logprobs = prepare_logprobs
    settings = {"prompt_groups_per_microbatch": 2, "refresh_policy_logprobs": True}
    size = 3 if returned == "ab" else 2
    error = await raised(world.pump(target_prompt_groups_per_step=size, **settings).step())
    assert isinstance(error, MisuseError) and f"for {size} prompt groups" in str(error)
    assert not world.trained and len(world.buffer.samples()) == size
