"""The rule for what calls return, where a pump, its adapters and patches apply it."""

from __future__ import annotations

import asyncio
import types

import pytest
from rigs.weight_sync import Failure, World

from megapatch import MegapatchError, MisuseError


# ------------------------------------------------------------------------------------------ a pump's calls
async def test_a_pump_waits_for_what_a_call_returns_and_leaves_data_alone():
    from megapatch.streaming._calls import perform

    done = []

    async def work(name):
        await asyncio.sleep(0)
        done.append(name)

    await perform(lambda: [work("sync"), work("sync")])
    assert done == ["sync"] * 2
    lazy = [work("data"), work("data")]
    assert await perform(lambda: lazy, data=True) is lazy
    assert len(done) == 2
    for coroutine in lazy:
        coroutine.close()
    with pytest.raises(MisuseError, match="generator"):
        await perform(lambda: (step for step in ()))


async def test_a_pump_whose_trainer_cancels_itself_does_not_look_cancelled():
    from rigs.streaming.world import World as Pumped

    async def cancelled():
        raise asyncio.CancelledError

    world = Pumped({"before finish": cancelled})
    await world.put("a")
    task = asyncio.ensure_future(world.pump().step())
    await asyncio.wait([task])
    assert not task.cancelled()
    assert isinstance(task.exception(), MegapatchError)


async def test_the_sync_of_a_group_whose_method_is_a_coroutine_function_is_waited_for():
    """As that of miles' main."""
    from megapatch.streaming._calls import perform
    from megapatch.streaming.slime import GroupWeights

    world = World()
    await perform(GroupWeights(types.SimpleNamespace(update_weights=world.body)).sync_weights)
    assert world.calls == ["body"]


# ------------------------------------------------------------------------------------------ patches
async def test_verls_replicas_are_all_resumed_where_one_was_cancelled(caplog):
    from megapatch._pausing.generation import resumed_on_failure
    from megapatch.patches.verl.weight_sync_resume import ReplicaCalls

    class Replica:
        def __init__(self, cancelled=False):
            self.cancelled, self.calls = cancelled, []

        async def abort_all_requests(self):
            self.calls.append("abort")

        async def resume_generation(self):
            if self.cancelled:
                raise asyncio.CancelledError
            await asyncio.sleep(0.01)
            self.calls.append("resume")

    replicas = [Replica(cancelled=True), Replica()]

    async def sync():
        with ReplicaCalls(replicas) as calls:
            async with resumed_on_failure(calls):
                for replica in replicas:
                    await replica.abort_all_requests()
                raise Failure

    with pytest.raises(Failure):
        await sync()
    assert replicas[1].calls == ["abort", "resume"]
    assert "generation could not be resumed" in caplog.text


def test_areals_resume_that_was_cancelled_does_not_hide_the_failure(caplog):
    from megapatch.patches.areal.weight_sync_resume import resume_after_failure

    async def cancelled():
        raise asyncio.CancelledError

    class RolloutEngine:
        def pause_generation(self): ...

        def continue_generation(self):
            asyncio.run(cancelled())

    class Engine:
        rollout_engine = RolloutEngine()

        def update_weights(self):
            self.rollout_engine.pause_generation()
            raise Failure

    with pytest.raises(Failure):
        resume_after_failure(Engine.update_weights)(Engine())
    assert "generation could not be resumed" in caplog.text
