"""Any result of a pause or a resume is waited for, or refused by its kind; a paused engine is resumed."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import datetime
import functools
import http.client
import io
import itertools
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from unittest import mock

import pytest
from rigs.weight_sync import Failure, World, bracket

from megapatch import MegapatchError, MisuseError
from megapatch._pausing.waiting import finished


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

    def values(self, name):
        return {"a": self.work(name), "b": self.work(name)}.values()

    def deque(self, name):
        return collections.deque([self.work(name)])

    def user_list(self, name):
        return collections.UserList([self.work(name)])

    def dataclass(self, name):
        return Pending("a", self.work(name))

    def namespace(self, name):
        return types.SimpleNamespace(servers=[self.work(name), Pending("b", self.threadsafe(name))])

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


@dataclasses.dataclass
class Pending:
    server: str
    work: object


def pooled(method, *arguments):
    pool = ThreadPool(1)
    found = getattr(pool, method)(*arguments)
    pool.close()
    pool.join()
    return found


KNOWN = {
    "text": "ok",
    "dictionary": {"status": 200, "at": datetime.datetime(2026, 1, 1)},
    "list": [None, 1, Pending("a", {"ok": True})],
    "namespace": types.SimpleNamespace(status=200),
    "response": http.client.HTTPResponse(types.SimpleNamespace(makefile=lambda _: io.BytesIO())),
    "object": type("Reply", (), {"__init__": lambda self: setattr(self, "servers", ["a"])})(),
    "mock": mock.MagicMock(),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_a_result_is_a_result(kind):
    KNOWN["response"].headers = KNOWN["response"].status = 200
    bracket(lambda: KNOWN[kind], lambda: KNOWN[kind])


class Work:
    """As torch.distributed's."""

    def is_completed(self): ...

    def wait(self): ...


class Client:
    def __init__(self, session):
        self.session = session


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
    "iterator": lambda: iter([1]),
    "chain": lambda: itertools.chain([1], [2]),
    "iterator in an object": lambda: types.SimpleNamespace(replies=iter([1])),
    "pool's iterator": lambda: pooled("imap", str, [1]),
    "pool's result": lambda: pooled("apply_async", str),
    "object that holds work": lambda: Client(threading.Event()),
    "object without attributes": object,
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


@pytest.mark.parametrize("kind", ["generator", "async generator", "function", "context manager"])
def test_where_nothing_may_have_run_it_is_not_ignored_either(kind):
    """As what a trainer's method returns is, if it is of a kind that is not known."""
    with pytest.raises(MisuseError, match="in which nothing may have run"):
        asyncio.run(finished(UNWAITABLE[kind](), ignored=True))


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
