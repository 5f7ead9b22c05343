"""Trainers that are plain objects, asyncio ones, or in between: sequential, in one thread, beside the loop."""

from __future__ import annotations

import asyncio
import collections
import functools
import gc
import threading

import pytest
import torch
from rigs.streaming.world import raised

from megapatch.streaming import RolloutBuffer, StreamingConfig, TrainPump, _calls


class Buffer(RolloutBuffer):
    """One that is not made for threads: the event loop has it."""

    def claim(self, group):
        assert threading.current_thread() is threading.main_thread()
        return super().claim(group)


class Generation:
    """Also a synchronizer."""

    def __init__(self):
        self.version, self.threads = 0, []

    async def pause_generation(self): ...

    async def resume_generation(self): ...

    def set_weight_version(self, version):
        self.version = version
        self.threads.append(threading.current_thread())

    def sync_weights(self):
        self.threads.append(threading.current_thread())


class Plain:
    """Says where and in which order it was called, and that no two calls overlap."""

    def __init__(self):
        self.calls, self.threads, self.inside = [], set(), threading.Lock()

    def note(self, call):
        assert self.inside.acquire(blocking=False), "called while another call is under way"
        self.calls.append(call)
        self.threads.add(threading.current_thread())
        self.work(call)
        self.inside.release()

    def work(self, call): ...

    def begin_train_step(self):
        self.note("begin")

    def train_microbatch(self, data):
        self.note(data[0])

    def finish_train_step(self):
        self.note("finish")
        return {"loss": 0.5}

    def abort_train_step(self):
        if self.inside.locked():
            self.inside.release()  # by the call that failed
        self.note("abort")


class Asyncio:
    def __init__(self):
        self.plain = Plain()
        self.calls, self.threads = self.plain.calls, self.plain.threads

    async def call(self, name, *args):
        await asyncio.sleep(0)
        return getattr(self.plain, name)(*args)


class ReturnsAwaitables(Asyncio):
    """Plain methods, as those of a decorated asyncio trainer."""


class Remote:
    """A Ray actor's method, without Ray."""

    def __init__(self, remote):
        self.remote = remote

    def remote(self, *args): ...

    def __call__(self, *args):
        raise TypeError("Actor methods cannot be called directly")


class Actor(Asyncio):
    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        return Remote(found) if name.endswith("_step") or name == "train_microbatch" else found


for name in ("begin_train_step", "train_microbatch", "finish_train_step", "abort_train_step"):

    async def method(self, *args, _name=name):
        return await self.call(_name, *args)

    setattr(Asyncio, name, method)
    setattr(ReturnsAwaitables, name, lambda self, *args, _name=name: self.call(_name, *args))


async def trained(trainer, groups="abcd", **settings):
    """One step with this trainer; what its generation has then, or what was raised."""
    buffer, generation = Buffer(), Generation()
    for group in groups:
        await buffer.put(group, {"group_id": group, "weight_version": 0}, group)
    config = StreamingConfig(
        generations_per_prompt=1,
        target_prompt_groups_per_step=len(groups),
        **settings,
    )
    error = await raised(TrainPump(config, trainer, buffer, generation, generation).step())
    return error or generation


@pytest.mark.parametrize("kind", [Plain, Asyncio, ReturnsAwaitables, Actor])
def test_any_kind_is_called_in_order(kind):
    trainer = kind()
    generation = asyncio.run(trained(trainer))
    assert generation.version == 1, generation
    assert trainer.calls == ["begin", *"abcd", "finish"]
    (thread,) = trainer.threads
    assert (thread is threading.main_thread()) == (kind is not Plain)
    if kind is Plain:
        assert generation.threads == [thread, thread]  # where the trainer's device is the current one


def test_the_thread_ends_with_the_pump():
    trainer = Plain()
    asyncio.run(trained(trainer))
    (thread,) = trainer.threads
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration, KeyError])
@pytest.mark.parametrize("call", ["begin", "b", "finish"])
def test_what_a_plain_trainer_raises(kind, call):
    """A StopIteration, such as of a data iterator that is exhausted, cannot be the result of a future."""

    class Failing(Plain):
        def work(self, name):
            if name == call:
                raise kind("exhausted")

    async def main():
        step = asyncio.ensure_future(trained(trainer))
        await asyncio.wait([step], timeout=10)
        assert step.done(), "it waits forever"
        return await step

    trainer = Failing()
    error = asyncio.run(main())
    assert trainer.calls[-1] == "abort"
    if kind is StopIteration:
        assert isinstance(error, RuntimeError) and "raised StopIteration" in str(error)
        error = error.__cause__
    assert type(error) is kind


def test_advantages_are_computed_in_another_thread_than_the_trainer():
    """While a group is trained on."""
    meet = threading.Barrier(2, timeout=30)

    class Meeting(Plain):
        def work(self, name):
            if name == "a":
                meet.wait()

    threads = set()

    def advantages(data):
        threads.add(threading.current_thread())
        if data == ["b"]:
            meet.wait()
        return data

    async def main():
        trainer, buffer, generation = Meeting(), RolloutBuffer(), Generation()
        for group in "ab":
            await buffer.put(group, {"group_id": group, "weight_version": 0}, group)
        config = StreamingConfig(generations_per_prompt=1, target_prompt_groups_per_step=2)
        await TrainPump(config, trainer, buffer, generation, generation, compute_advantages=advantages).step()
        assert trainer.calls == ["begin", "a", "b", "finish"]
        (thread,) = threads
        assert thread not in {threading.main_thread(), *trainer.threads}

    asyncio.run(main())


def test_a_callable_that_is_no_function():
    class Partial(Plain):
        def __init__(self):
            super().__init__()
            self.train_microbatch = functools.partial(super().train_microbatch)

    trainer = Partial()
    assert asyncio.run(trained(trainer)).version == 1


def test_the_pump_can_be_cancelled_while_a_plain_call_blocks():
    """A thread cannot be stopped: it is waited for."""

    class Blocking(Plain):
        entered, go_on = threading.Event(), threading.Event()

        def work(self, name):
            if name == "a":
                self.entered.set()
                assert self.go_on.wait(30)

    async def main():
        trainer = Blocking()
        step = asyncio.ensure_future(trained(trainer))
        while not trainer.entered.is_set():
            await asyncio.sleep(0)
        step.cancel()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not step.done()
        trainer.go_on.set()
        assert isinstance(await step, asyncio.CancelledError)
        assert trainer.calls == ["begin", "a", "abort"]

    asyncio.run(main())


def test_the_trainers_thread_has_the_device_of_the_one_that_made_the_pump(monkeypatch):
    devices = collections.defaultdict(int, {threading.get_ident(): 3})  # by thread
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices[threading.get_ident()])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.update({threading.get_ident(): device}))

    class Trainer:
        def device(self):
            return threading.current_thread().name, torch.cuda.current_device()

    async def main():
        calls = _calls.SequentialCalls(_calls.Timer(), _calls.Watchdog())
        return await calls(Trainer(), "device")

    name, device = asyncio.run(main())
    assert name.startswith("megapatch-trainer") and device == 3
