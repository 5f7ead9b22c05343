"""A client's own cancellations and event loops: whoever was paused is resumed, or the error says it is not."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import types

import pytest
from rigs.command import heed_ctrl_c
from rigs.weight_sync import Failure, World, bracket

from megapatch import MegapatchError, MisuseError
from megapatch.weight_sync import paused_generation


# ------------------------------------------------------------------------------------------ cancelled by itself
class Cancelled(World):
    """A client whose own task was cancelled, as when its connection is closed."""

    def __init__(self, call, **options):
        super().__init__(**options)
        self.call = call

    async def point(self, place):
        if place == f"{self.call}, first":
            raise asyncio.CancelledError


def in_a_task_group(client):
    """Return what leaves a group of tasks, one of which syncs weights."""

    async def sync():
        async with paused_generation(client):
            client.calls.append("body")

    async def main():
        if sys.version_info < (
            3,
            11,
        ):
            await asyncio.ensure_future(sync())
        else:
            async with asyncio.TaskGroup() as group:
                group.create_task(sync())

    try:
        asyncio.run(main())
    except BaseException as error:
        return error
    return None


@pytest.mark.parametrize("event", [True, False], ids=["event", "no event"])
@pytest.mark.parametrize("call", ["pause", "resume"])
def test_a_cancellation_of_the_clients_own_is_a_failure(call, event):
    client = Cancelled(call, event=event)
    error = in_a_task_group(client)
    failure = getattr(error, "exceptions", [error])[0]
    assert isinstance(failure, MegapatchError), error
    assert f"{call}_generation() was cancelled before it was done" in str(failure)
    assert ("body" in client.calls) == (call == "resume")
    resumed = call == "pause" and not event
    assert client.calls.count("resume") == (resumed or call == "resume")
    if call == "resume" and sys.version_info >= (3, 11):
        assert failure.__notes__ == ["generation could not be resumed"]


async def test_a_resume_that_was_cancelled_after_a_failed_body_is_logged(caplog):
    client = Cancelled("resume")
    with pytest.raises(Failure):
        async with paused_generation(client):
            raise Failure
    assert "generation could not be resumed" in caplog.text


async def test_a_pause_that_a_cancellation_does_not_stop_is_undone():
    world, begun = World(), asyncio.Event()

    async def pause():
        world.calls.append("pause")
        world.mark(paused=True)
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(10)

    async def sync():
        async with paused_generation(world, pause=pause):
            raise AssertionError

    task = asyncio.ensure_future(sync())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.calls == ["pause", "resume"]
    assert not world.generation_paused_event.is_set()


# ------------------------------------------------------------------------------------------ loops
class Bound(World):
    """A client whose connection belongs to the event loop that has opened it, with a task that reads from it."""

    async def pause_generation(self):
        self.loop, self.reader = asyncio.get_running_loop(), asyncio.ensure_future(asyncio.sleep(3600))
        await super().pause_generation()

    async def resume_generation(self):
        assert asyncio.get_running_loop() is self.loop
        assert not self.reader.done()
        await super().resume_generation()


@pytest.mark.parametrize("fails", [False, True])
def test_a_client_that_is_bound_to_its_loop_is_resumed(fails):
    client = Bound()
    with contextlib.suppress(Failure), paused_generation(client):
        asyncio.run(client.body())  # as a sync may, meanwhile
        if fails:
            raise Failure
    assert client.calls == ["pause", "body", "resume"] and not client.paused
    assert client.reader.cancelled() and client.loop.is_closed()


def test_a_plain_function_may_run_a_loop_of_its_own():
    world = World()
    with paused_generation(
        None,
        pause=lambda: asyncio.run(world.pause_generation()),
        resume=lambda: asyncio.run(world.resume_generation()),
    ):
        assert world.paused
    assert not world.paused


def test_in_a_loop_with_is_refused_before_anything_is_paused():
    """A resume that turns out to need the loop would come too late."""

    async def main():
        world = World()
        with pytest.raises(MisuseError, match=r"asyncio\.to_thread"):
            bracket(lambda: world.mark(paused=True), lambda: world.resume_generation(), how="with")
        assert not world.paused
        await asyncio.to_thread(bracket, world.pause_generation, world.resume_generation, how="with")
        assert world.calls == ["pause", "resume"]

    asyncio.run(main())


def test_without_asyncio_it_is_refused_before_anything_is_paused():
    """As under trio, to which the resume could not be handed."""
    world = World()

    async def sync():
        async with paused_generation(world):
            raise AssertionError

    with pytest.raises(MisuseError, match="waits with asyncio"):
        sync().send(None)
    assert world.calls == []


async def test_a_client_whose_mark_is_a_question_to_wait_for():
    """Every coroutine is true: the sync would take generation as paused."""
    client = World()
    asked = client.body()
    client.generation_paused_event = types.SimpleNamespace(is_set=lambda: asked)
    with pytest.raises(MisuseError, match="expected True or False"):
        async with paused_generation(client):
            raise AssertionError
    asked.close()


INTERRUPTED = """
import asyncio, itertools, sys, types
from megapatch import weight_sync
from megapatch._pausing import blocking, generation, waiting
from megapatch.weight_sync import paused_generation

FILES = {module.__file__ for module in (weight_sync, blocking, generation, waiting)}
EXIT = paused_generation.__exit__.__code__

class Plain:
    paused = False

    def pause_generation(self):
        self.paused = True

    def resume_generation(self):
        self.paused = False

class Instant(Plain):
    async def pause_generation(self):
        self.paused = True

    async def resume_generation(self):
        self.paused = False

class Slow(Instant):
    async def pause_generation(self):
        await asyncio.sleep(0.001)
        self.paused = True

class Marked(Slow):
    @property
    def generation_paused_event(self):
        return types.SimpleNamespace(is_set=lambda: self.paused, clear=self.unmark)

    def unmark(self):
        self.paused = False

def sync(client, nth):
    lines = itertools.count(1)

    def trace(frame, event, argument):
        code = frame.f_code
        if code.co_filename not in FILES or code.co_name == "__init__":
            return None
        may_be_kept_out = code is not EXIT or frame.f_lineno > EXIT.co_firstlineno + 3  # in its `try`
        if event == "line" and may_be_kept_out and next(lines) == nth:
            raise KeyboardInterrupt
        return trace

    pausing = paused_generation(client)
    sys.settrace(trace)
    with pausing:
        assert client.paused

for kind in (Plain, Instant, Slow, Marked):
    for nth in itertools.count(1):
        client = kind()
        try:
            sync(client, nth)
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
            assert not client.paused, (kind, nth)
    print(kind.__name__, nth)
"""


def test_an_interruption_of_any_line_leaves_generation_running_and_waits_for_nothing():
    command = [sys.executable, "-W", "ignore", "-c", INTERRUPTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr + done.stdout
    numbers = dict(line.split() for line in done.stdout.splitlines())
    assert list(numbers) == ["Plain", "Instant", "Slow", "Marked"] and int(numbers["Instant"]) > 100, numbers


@pytest.mark.skipif(sys.platform == "win32", reason="sends itself a signal")
def test_ctrl_c_in_a_with_ends_the_pause_and_resumes():
    code = """
import asyncio, os, signal
from megapatch.weight_sync import paused_generation

async def pause():
    print("pause")
    asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)
    try:
        await asyncio.sleep(10)
    finally:
        print("ended")

async def resume():
    print("resume")

try:
    with paused_generation(None, pause=pause, resume=resume):
        print("body")
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, preexec_fn=heed_ctrl_c
    )
    assert done.stdout.split() == ["pause", "ended", "resume", "interrupted"], done.stderr
