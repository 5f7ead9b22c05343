"""Whatever a pause, a resume or a pump's call returns is waited for, in collections too; an engine is resumed."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from rigs.weight_sync import Failure, World, bracket

from megapatch import MegapatchError, MisuseError
from megapatch._pausing.waiting import finished, result_of


class Engines:
    """Their work ends a moment after the call that begins it."""

    def __init__(self):
        self.done = []

    async def work(self, name):
        await asyncio.sleep(0.01)
        self.done.append(name)

    async def coroutine(self, name):
        await self.work(name)

    def list_of_coroutines(self, name):
        return [self.work(name), self.work(name)]

    def nested(self, name):
        return {"node 0": (self.work(name), [None, self.work(name)]), "node 1": "ok"}

    def set_of_coroutines(self, name):
        return {self.work(name)}

    def frozen_set_of_coroutines(self, name):
        return frozenset(self.set_of_coroutines(name))

    async def coroutine_that_returns_a_list(self, name):
        return self.list_of_coroutines(name)

    async def coroutine_that_returns_another(self, name):
        return self.work(name)

    def threadsafe(self, name):
        """As of a client whose event loop runs in a thread of its own."""
        return asyncio.run_coroutine_threadsafe(self.work(name), self.loop)

    def executor(self, name):
        return self.pool.submit(lambda: asyncio.run(self.work(name)))

    def future(self, name):
        return asyncio.ensure_future(self.work(name))

    @contextlib.contextmanager
    def running(self):
        self.loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self.loop.run_forever)
        thread.start()
        with ThreadPoolExecutor(1) as self.pool:
            yield
        self.loop.call_soon_threadsafe(self.loop.stop)
        thread.join()
        self.loop.close()


KINDS = [name for name in vars(Engines) if name not in ("work", "future", "running") and not name.startswith("_")]


@pytest.mark.parametrize(
    ("kind", "how"), [*((kind, how) for kind in KINDS for how in ("with", "async with")), ("future", "async with")]
)
def test_whatever_is_returned_is_waited_for(kind, how):
    engines, seen = Engines(), []
    with engines.running():
        call = getattr(engines, kind)
        pause, resume = functools.partial(call, "pause"), functools.partial(call, "resume")
        bracket(pause, resume, lambda: seen.extend(engines.done), how)
    assert set(seen) == {"pause"}
    assert set(engines.done) == {"pause", "resume"}
    assert engines.done.count("resume") == len(seen)


Reply = collections.namedtuple("Reply", "status servers")


@pytest.mark.parametrize("result", ["ok", {"status": 200}, Reply(200, ["a"]), object(), mock.MagicMock()])
async def test_anything_else_is_the_result_itself(result):
    assert await finished(result) is result


async def asynchronous_generator():
    raise AssertionError
    yield


class Work:
    """As torch.distributed's."""

    def is_completed(self): ...

    def wait(self): ...


UNWAITABLE = {
    "generator": lambda: (engine for engine in ()),
    "async generator": asynchronous_generator,
    "list of generators": lambda: ["ok", [(engine for engine in ())]],
    "method": lambda: Engines().work,
    "work": Work,
    "list of work": lambda: ["ok", [Work()]],
    "thread": lambda: threading.Thread(target=str),
}


@pytest.mark.parametrize("how", ["with", "async with"])
@pytest.mark.parametrize("kind", UNWAITABLE)
def test_what_cannot_be_waited_for_is_refused(kind, how):
    calls = []

    def body():
        calls.append("body")

    with pytest.raises(MisuseError, match=r"pause_generation\(\) returned a"):
        bracket(UNWAITABLE[kind], lambda: calls.append("resume"), body, how)
    assert calls == ["resume"]
    with pytest.raises(MisuseError, match=r"resume_generation\(\) returned a") as raised:
        bracket(lambda: None, UNWAITABLE[kind], body, how)
    assert sys.version_info < (3, 11) or raised.value.__notes__ == ["generation could not be resumed"]


@pytest.mark.parametrize("how", ["with", "async with"])
def test_where_one_of_several_fails_the_others_are_waited_for(how, caplog):
    """One server cannot pause: the other one has, and is resumed."""
    engines, calls = Engines(), []

    async def fails(error):
        raise error

    def pause():
        return [fails(NotImplementedError("no")), engines.work("pause"), fails(Failure("another"))]

    def resume():
        calls.append(list(engines.done))

    with pytest.raises(MegapatchError, match=r"2 of 3 parts .* failed: NotImplementedError: no"):
        bracket(pause, resume, lambda: calls.append("body"), how)
    assert calls == [["pause"]]
    assert "Failure: another" in caplog.text


async def test_what_cannot_be_waited_for_is_raised_before_what_fails():
    async def fails():
        raise Failure

    with pytest.raises(MisuseError, match="the call returned a Work"):
        await finished([fails(), Work()])


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


async def test_what_is_in_data_is_not_waited_for():
    async def claimed():
        return (number for number in (1, 2))

    assert list(await result_of(claimed(), "claim()", data=True)) == [1, 2]
    with pytest.raises(MisuseError, match="nothing may have run"):
        await result_of(claimed(), "sync()")
