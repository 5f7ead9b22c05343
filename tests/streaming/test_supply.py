"""Prompt groups are waited for, also several for a call: looks at the buffer, and what an empty step says."""

from __future__ import annotations

import asyncio

import pytest
from rigs.streaming.world import Fault, World, flat, raised

from megapatch import MegapatchError, MisuseError
from megapatch.streaming import EmptyStepError, RolloutBuffer, StreamingConfig, _supply


# ------------------------------------------------------------------------------------------ looking
async def test_the_buffer_is_not_looked_at_again_for_a_group_that_was_seen():
    world = await World.of("abc")
    await world.pump(target_prompt_groups_per_step=3).step()
    assert world.trained == [["a", "b", "c"]]
    assert world.calls.count("samples") == 1


async def test_the_buffer_is_looked_at_again_for_another_version():
    world = await World.of("a")
    await world.put("next", version=1)
    await world.pump().run(2)
    assert world.trained == [["a"], ["next"]]


async def test_looks_take_a_tenth_of_the_time_where_samples_arrive_one_by_one(monkeypatch):
    """Each look takes 10 ms here, and a sample comes each millisecond."""
    loop, groups_of = asyncio.get_running_loop(), _supply.Groups

    def taking_its_time(*arguments):
        loop.now += 0.01
        return groups_of(*arguments)

    world = World()
    step = asyncio.ensure_future(world.pump(target_prompt_groups_per_step=2, generations_per_prompt=500).step())
    monkeypatch.setattr(_supply, "Groups", taking_its_time)
    for number in range(1000):
        await world.buffer.put(str(number), {"group_id": number % 2, "weight_version": 0}, str(number))
        await asyncio.sleep(0.001)
    await step
    assert len(flat(world.trained)) == 1000
    assert 1.0 < loop.time() < 1.3 and 10 < world.calls.count("samples") < 14


async def test_groups_of_one_look_are_picked_without_another_wait(monkeypatch):
    """The look takes 10 ms here."""
    loop, groups_of = asyncio.get_running_loop(), _supply.Groups

    def taking_its_time(*arguments):
        loop.now += 0.01
        return groups_of(*arguments)

    world = await World.of("abc")
    monkeypatch.setattr(_supply, "Groups", taking_its_time)
    await world.pump(target_prompt_groups_per_step=3).step()
    assert loop.time() < 0.05


class Exact(RolloutBuffer):
    """Changes only where there is something to change, as a `Buffer` may."""

    def give_back(self, groups):
        if any(key not in self.samples() for group in groups for key in group.keys):
            super().give_back(groups)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_the_buffer_is_looked_at_again_after_a_claim_that_failed(when):
    world = World({f"{when} claim": "raise"})
    world.buffer = Exact()
    await world.put("a")
    pump = world.pump()
    assert isinstance(await raised(pump.step()), Fault)
    await pump.step()
    assert world.trained == [["a"]]


async def test_the_buffer_is_looked_at_again_after_a_claim_that_it_refused():
    """Nothing is given back then."""

    async def refuse():
        del world.plan["before claim"]
        raise MisuseError("somebody else has it")

    world = await World.of("a", {"before claim": refuse})
    pump = world.pump()
    assert isinstance(await raised(pump.step()), MisuseError)
    await pump.step()
    assert world.trained == [["a"]]


async def test_groups_that_are_too_old_are_cleared_again_after_a_clear_that_failed():
    world = await World.of("a")
    pump = world.pump()
    await pump.step()
    await world.put("old")
    await world.put("new", version=1)
    world.plan["before clear"] = "raise"
    assert isinstance(await raised(pump.step()), Fault)
    await pump.step()
    assert (world.trained, len(world.buffer)) == ([["a"], ["new"]], 0)


# ------------------------------------------------------------------------------------------ empty steps
async def test_an_empty_step_says_what_was_waiting():
    world = await World.of(["early"], version=0)
    await world.put("half", samples=1, expected_num_samples=2)
    await world.put("future", version=1)
    await world.put("unfinished", committed=False)
    world.buffer.close()
    pump = world.pump(target_prompt_groups_per_step=2)
    with pytest.raises(EmptyStepError) as caught:
        await pump.step()
    error = caught.value
    assert isinstance(error, MegapatchError)
    for part in (
        "has 1 of its 2 prompt groups",
        "the buffer is closed",
        "3 samples in 3 prompt groups, of which 0 eligible, 1 incomplete, 1 not committed, 0 too old, 1 from "
        "the future",
        "too old meanwhile: 0",
    ):
        assert part in str(error)
    assert (error.trained, error.target) == (1, 2)
    assert world.called() == ["claim early", "begin", "microbatch early", "abort", "give_back early"]
    assert pump.version == 0 and "early" in world.buffer.samples()


async def test_an_empty_step_says_what_was_evicted():
    """Where generation does not know its version, all that comes is too old."""
    world = await World.of("a")
    pump = world.pump()
    await pump.step()
    await world.put_each("bc", version=0)
    world.buffer.close()
    with pytest.raises(EmptyStepError, match="Evicted as too old meanwhile: 2 prompt groups"):
        await pump.step()
    assert world.called()[-1] == "clear b c"  # no step was open


# ------------------------------------------------------------------------ several groups a microbatch call
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
