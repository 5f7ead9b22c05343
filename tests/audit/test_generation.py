"""resumed: syncs that fail, and leave generation paused."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref

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


# ------------------------------------------------------------------------ resumed
def test_a_failed_sync_that_leaves_generation_paused_is_found():
    client = Client()
    asyncio.run(sync(client))
    assert found() == [("resumed", "generation is still paused after Trainer.sync(), which failed")]
    assert any("in sync" in line for line in audit.findings()[0].where)


@pytest.mark.parametrize("event", [threading.Event, asyncio.Event])
@pytest.mark.parametrize("ending", [{"raises": False}, {"resumes": True}])
def test_generation_that_runs_again_is_not(ending, event):
    client = Client(event=event)
    asyncio.run(sync(client, **ending))
    assert found() == []


class PlainClient:
    """Marks nothing: that it is paused is known from its calls alone."""

    fails = False

    async def pause_generation(self):
        pass

    async def resume_generation(self):
        if self.fails:
            raise OSError("no resume")


def test_a_pause_after_generation_ran_again_is_not_the_one_of_the_failed_sync():
    client = PlainClient()
    asyncio.run(sync(client, resumes=True))
    asyncio.run(client.pause_generation())
    assert found() == []


def test_generation_whose_resume_failed_is_still_paused():
    client = PlainClient()
    client.fails = True
    with pytest.raises(OSError, match="no resume"):
        asyncio.run(sync(client, resumes=True))
    assert [rule for rule, _ in found()] == ["resumed"]


def test_generation_that_the_caller_has_resumed_by_other_means_is_not():
    client = Client()
    asyncio.run(sync(client))
    client.generation_paused_event.clear()
    assert found() == []


def test_it_is_reported_while_training_waits(monkeypatch):
    monkeypatch.setattr(_weight_syncs, "_GRACE", 0.01)
    client, reported = Client(), threading.Event()
    monkeypatch.setattr(running_audit().ledger, "report", lambda *ignored: reported.set())
    asyncio.run(sync(client))
    assert reported.wait(30)


def test_a_pause_that_fails_and_marks_the_client_is_found():
    client = Client("pause")
    with pytest.raises(OSError, match="no pause"):
        asyncio.run(client.pause_generation())
    assert found() == [("resumed", "generation is still paused after a pause that failed")]


def test_a_pause_of_what_is_paused_already_is_not():
    client = Client()
    asyncio.run(client.pause_generation())
    client.fails = "pause"
    with pytest.raises(OSError, match="no pause"):
        asyncio.run(client.pause_generation())
    assert found() == []


def test_a_resume_of_paused_generation_that_fails_is_found():
    async def main():
        async with paused_generation(Client("resume")):
            pass

    with pytest.raises(OSError, match="no resume"):
        asyncio.run(main())
    assert found() == [
        ("resumed", "resuming generation after a weight sync has failed: OSError: no resume"),
    ]


@pytest.mark.parametrize("raises", [False, True])
def test_paused_generation_that_resumes_has_no_findings(raises):
    async def main():
        async with paused_generation(Client()):
            if raises:
                raise KeyError

    with pytest.raises(KeyError) if raises else contextlib.nullcontext():
        asyncio.run(main())
    assert found() == []


def test_a_client_that_is_gone_is_not_kept_alive():
    client = Client()
    asyncio.run(sync(client))
    reference = weakref.ref(client)
    del client
    gc.collect()
    assert reference() is None
    assert found() == []
