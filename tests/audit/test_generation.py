"""resumed: syncs that fail, and leave generation paused."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from functools import partial
from operator import methodcaller

import pytest
from rigs.audit import found, part_of, running_audit, watcher_of

from megapatch import audit
from megapatch.audit import _weight_syncs
from megapatch.streaming import TrainPump  # noqa: F401  (before the audit, as in a run that starts it late)
from megapatch.weight_sync import paused_generation

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(scope="module", autouse=True)
def _audited():
    audit.start()
    generation = part_of(running_audit(), _weight_syncs.WeightSyncs)
    for client in (Client, PlainClient):
        client.pause_generation = watcher_of(generation, "RemoteInfEngine.pause_generation")(
            client.pause_generation
        )
        client.resume_generation = watcher_of(generation, "RemoteInfEngine.continue_generation")(
            client.resume_generation
        )
    Trainer.sync = generation.syncing("client", "Trainer.sync")(Trainer.sync)
    yield
    audit.stop()


class Client:
    """Marks itself as paused, as SkyRL's client does, in an event of asyncio's or of threading's."""

    def __init__(self, fails=None, event=threading.Event):
        self.fails, self.generation_paused_event = fails, event()

    async def pause_generation(self):
        self.generation_paused_event.set()
        if self.fails == "pause":
            raise OSError("no pause")

    async def resume_generation(self):
        if self.fails == "resume":
            raise OSError("no resume")
        self.generation_paused_event.clear()


class Trainer:
    """Pauses and resumes by itself."""

    def __init__(self, client):
        self.client = client

    async def sync(self, raises=True):
        if raises:
            raise OSError("no sync")


async def sync(client, raises=True, resumes=False):
    await client.pause_generation()
    try:
        await Trainer(client).sync(raises)
    except OSError:
        if not resumes:
            return
    await client.resume_generation()


class PlainClient:
    """Marks nothing: that it is paused is known from its calls alone."""

    def __init__(self, fails=None):
        self.fails = fails

    async def pause_generation(self):
        pass

    async def resume_generation(self):
        if self.fails:
            raise OSError("no resume")


async def resumed_by_other_means(client):
    await sync(client)
    client.generation_paused_event.clear()


async def paused_after_it_ran_again(client):
    await sync(client, resumes=True)
    await client.pause_generation()


async def paused_twice(client):
    await client.pause_generation()
    client.fails = "pause"
    await client.pause_generation()


async def within(client, raises=False):
    async with paused_generation(client):
        if raises:
            raise OSError


without_failure, resumed_after = partial(sync, raises=False), partial(sync, resumes=True)
LEFT = "generation is still paused after Trainer.sync(), which failed"
NOT_PAUSED = "generation is still paused after a pause that failed"
NOT_RESUMED = "resuming generation after a weight sync has failed: OSError: no resume"
SCENARIOS = {
    "a sync fails": (Client(), sync, LEFT),
    "a sync fails, and then the resume": (PlainClient("resume"), resumed_after, LEFT),
    "a pause fails, and marks the client": (Client("pause"), methodcaller("pause_generation"), NOT_PAUSED),
    "a resume fails": (Client("resume"), within, NOT_RESUMED),
    "no sync fails": (Client(), without_failure, None),
    "a sync fails, and generation is resumed": (Client(event=asyncio.Event), resumed_after, None),
    "the caller has resumed it by other means": (Client(), resumed_by_other_means, None),
    "a later pause is another one": (PlainClient(), paused_after_it_ran_again, None),
    "the pause of what is paused fails": (Client(), paused_twice, None),
    "a block ends": (Client(), within, None),
    "a block raises": (Client(), partial(within, raises=True), None),
}
"""A client, what happens to it, and what is found of that."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_generation_that_a_failure_leaves_paused_is_found(name):
    client, happens, what = SCENARIOS[name]
    with contextlib.suppress(OSError):
        asyncio.run(happens(client))
    assert found() == ([("resumed", what)] if what else [])


def test_the_line_is_that_of_the_sync():
    client = Client()
    asyncio.run(sync(client))
    assert any("in sync" in line for line in audit.findings()[0].where)


def test_it_is_reported_while_training_waits(monkeypatch):
    monkeypatch.setattr(_weight_syncs, "_GRACE", 0.01)
    client, reported = Client(), threading.Event()
    monkeypatch.setattr(running_audit().ledger, "report", lambda *ignored: reported.set())
    asyncio.run(sync(client))
    assert reported.wait(30)


def test_a_client_that_is_gone_is_not_kept_alive():
    client = Client()
    asyncio.run(sync(client))
    reference = weakref.ref(client)
    del client
    gc.collect()
    assert reference() is None
    assert found() == []
