"""The order of a pump's calls while nothing fails."""

from __future__ import annotations

import asyncio

from rigs.streaming.world import World


async def test_one_step():
    world = await World.of("abc", samples=2)
    pump = world.pump(generations_per_prompt=2, target_prompt_groups_per_step=3)
    await pump.step()
    assert world.called() == [
        "claim a",
        "begin",
        "microbatch a0 a1",
        "claim b",
        "microbatch b0 b1",
        "claim c",
        "microbatch c0 c1",
        "finish",
        "clear a b c",
        "pause",
        "sync 1",
        "stamp 1",
        "resume",
    ]
    assert pump.version == world.generation_version == 1
    assert pump.admitted and len(world.buffer) == 0


async def test_several_optimizer_steps_and_one_sync():
    world = await World.of("abcdef")
    pump = world.pump(target_prompt_groups_per_step=6, train_global_batch_size=2, max_staleness=2)
    await pump.step()
    assert world.called("begin", "finish", "clear", "sync", "stamp") == [
        *["begin", "finish", "clear a b", "begin", "finish", "clear c d", "begin", "finish", "clear e f"],
        *["sync 3", "stamp 3"],
    ]
    assert world.trained == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert pump.version == 3


async def test_the_version_is_up_before_samples_are_cleared_and_not_before_finish():
    world = World()
    seen = {}
    for place in ("before finish", "after finish", "before clear", "before sync"):

        async def look(place=place):
            seen[place] = pump.version

        world.plan[place] = look
    await world.put("a")
    pump = world.pump()
    await pump.step()
    assert seen == {"before finish": 0, "after finish": 0, "before clear": 1, "before sync": 1}


async def test_the_long_tail_comes_later_or_never():
    """Quick groups go first; what is too old when it comes is cleared, untrained."""
    world = World()
    pump = world.pump(max_staleness=1)
    await world.put("slow", committed=False)
    for version in range(2):
        await world.put(f"quick {version}", version=version)
        await pump.step()
    await world.put("slow", version=0)
    await world.put("slower", version=1)
    await pump.step()
    assert world.trained == [["quick 0"], ["quick 1"], ["slower"]]
    assert "clear slow" in world.calls
    assert len(world.buffer) == 0


async def test_a_group_is_picked_when_the_trainer_has_room_for_it():
    """An older one that came meanwhile goes first; of claimed ones there are at most two."""
    world = World({"before microbatch": lambda: asyncio.sleep(100)})
    pump = world.pump(target_prompt_groups_per_step=4, max_staleness=5, version=5)
    await world.put_each("abc", version=5)
    task = asyncio.ensure_future(pump.step())
    await asyncio.sleep(50)
    assert world.called() == ["claim a", "begin", "claim b"]
    await world.put("old", version=1)
    await task
    assert world.trained == [["a", "b", "old", "c"]]


async def test_the_next_group_is_prepared_while_one_is_trained_on():
    async def advantages(data):
        world.calls.append(f"advantages {data[0]}")
        await asyncio.sleep(1)
        return [f"{data[0]}!"]

    world = await World.of("abc", {"before microbatch": lambda: asyncio.sleep(5)})
    begun = asyncio.get_running_loop().time()
    await world.pump(target_prompt_groups_per_step=3, compute_advantages=advantages).step()
    assert asyncio.get_running_loop().time() - begun == 1 + 3 * 5
    assert world.called("advantages", "microbatch") == [
        *["advantages a", "advantages b", "microbatch a!", "advantages c", "microbatch b!", "microbatch c!"]
    ]


def test_log_probs_then_advantages_then_the_microbatch():
    async def main():
        asked = []

        class Refreshing(World):
            async def prepare_logprobs(self, data, **which):
                asked.append(which)
                await super().prepare_logprobs(data)
                return [f"logprobs {data[0]}"]

        world = Refreshing()
        await world.put("a")
        pump = world.pump(refresh_reference_logprobs=True, compute_advantages=lambda data: [*data, "advantages"])
        await pump.step()
        assert asked == [{"refresh_policy_logprobs": False, "refresh_reference_logprobs": True}]
        assert world.called("prepare", "begin", "microbatch") == [
            *["prepare a", "begin", "microbatch logprobs a advantages"]
        ]

    # a plain function of ours runs in a thread, so real time
    asyncio.run(main())


async def test_it_does_not_ask_the_buffer_while_nothing_changes():
    world = World()
    task = asyncio.ensure_future(world.pump().step())
    await asyncio.sleep(500)
    assert world.calls == ["changes", "samples", "wait"]
    await world.put("a", committed=False)
    await asyncio.sleep(50)
    assert world.calls.count("samples") == 2
    await world.put("a")
    await task


async def test_a_change_between_looking_and_waiting_is_not_missed():
    world = World()
    world.plan["after samples"] = lambda: world.put("a") if not len(world.buffer) else asyncio.sleep(0)
    await world.pump().step()
    assert world.trained == [["a"]]
