"""Any result of a pause or a resume is waited for, or refused by its kind; a paused engine is resumed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from rigs.weight_sync import Failure, World, bracket

from megapatch import MegapatchError, MisuseError


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

    async def coroutine_that_returns_a_list(self, name):
        return self.list_of_coroutines(name)

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


KINDS = ["coroutine", "list_of_coroutines", "nested", "coroutine_that_returns_a_list", "threadsafe", "executor"]


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


class Work:
    """As torch.distributed's."""

    def is_completed(self): ...

    def wait(self): ...


async def asynchronous_generator():
    raise AssertionError
    yield


@contextlib.contextmanager
def paused():
    raise AssertionError
    yield


UNWAITABLE = {
    "generator": lambda: (engine for engine in ()),
    "async generator": asynchronous_generator,
    "map": lambda: map(str, ()),
    "function": lambda: print,
    "method": lambda: World().pause_generation,
    "context manager": paused,
    "work": Work,
    "list of work": lambda: ["ok", [Work()]],
    "thread": lambda: threading.Thread(target=str),
}


@pytest.mark.parametrize("how", ["with", "async with"])
@pytest.mark.parametrize("kind", UNWAITABLE)
def test_what_cannot_be_waited_for_is_refused_as_what_it_is(kind, how):
    calls = []

    def body():
        calls.append("body")

    with pytest.raises(MisuseError, match=r"pause_generation\(\) returned a"):
        bracket(UNWAITABLE[kind], lambda: calls.append("resume"), body, how)
    assert calls == ["resume"]
    with pytest.raises(MisuseError, match=r"resume_generation\(\) returned a") as raised:
        bracket(lambda: None, UNWAITABLE[kind], body, how)
    assert sys.version_info < (3, 11) or raised.value.__notes__ == ["generation could not be resumed"]


@pytest.mark.parametrize("result", ["ok", {"status": 200}, [None, 1], types.SimpleNamespace(status=200)], ids=str)
def test_a_result_is_a_result(result):
    bracket(lambda: result, lambda: result)


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
