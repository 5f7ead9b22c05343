"""Weight syncs around clients of all kinds: functions, coroutines, actors, and what cannot pause."""

from __future__ import annotations

import asyncio
import itertools
import logging
from unittest import mock

import pytest
from rigs.weight_sync import Failure, World, bracket

from megapatch import MegapatchError
from megapatch.patches.skyrl.pause_rollback import clear_mark_on_failure
from megapatch.weight_sync import _warned, paused_generation


class Plain:
    def __init__(self, raising=()):
        self.raising, self.calls = raising, []

    def pause_generation(self):
        self._call("pause")

    def resume_generation(self):
        self._call("resume")

    def _call(self, name):
        self.calls.append(name)
        if name in self.raising:
            raise Failure(name)


@pytest.mark.parametrize("raising", [*itertools.product(["pause", None], ["body", None], ["resume", None])])
@pytest.mark.parametrize("how", ["with", "async with"])
def test_plain_functions(how, raising, caplog):
    client = Plain(raising)

    def body():
        client._call("body")

    async def in_loop():
        async with paused_generation(client) as paused:
            assert paused
            body()

    def blocking():
        with paused_generation(client) as paused:
            assert paused
            body()

    def run():
        blocking() if how == "with" else asyncio.run(in_loop())

    pause, sync, resume = raising
    if any(raising):
        with pytest.raises(Failure, match=pause or sync or resume):
            run()
    else:
        run()
    assert client.calls == ["pause", *([] if pause else ["body"]), "resume"]
    messages = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len([text for text in messages if "mixture" in text]) == bool(sync and not pause)
    assert len([text for text in messages if "could not be resumed" in text]) == bool(resume and (pause or sync))


def test_methods_of_an_actor():
    """As Ray has them, without Ray: not to be called, with a remote() whose reference can be awaited."""
    calls = []

    class ObjectRef(str):
        def __await__(self):
            calls.append(f"await {self}")
            return iter(())

    class ActorMethod:
        def __init__(self, name):
            self.name = name

        def __call__(self):
            raise TypeError("Actor methods cannot be called directly")

        def remote(self):
            return ObjectRef(self.name)

    for how in ("with", "async with"):
        bracket(ActorMethod("pause"), ActorMethod("resume"), lambda: calls.append("body"), how)
        assert calls == ["await pause", "body", "await resume"]
        calls.clear()


async def test_a_mock_is_called_as_it_would_be():
    client = mock.AsyncMock(generation_paused_event=None)

    async with paused_generation(client):
        client.resume_generation.assert_not_called()
    client.pause_generation.assert_awaited_once_with()
    client.resume_generation.assert_awaited_once_with()


# ------------------------------------------------------------------------------------------ that cannot pause
class NoAbort(World):
    """As SkyRL's client asks engines that have no such method."""

    async def pause_generation(self):
        await super().pause_generation()
        object().abort_generation()


class NotThere(World):
    async def pause_generation(self):
        await super().pause_generation()
        raise NotImplementedError("this engine cannot abort")


class NoMethods:
    async def body(self):
        pass


class NoResume(NoMethods):
    async def pause_generation(self):
        raise AssertionError


class NoPause(NoMethods):
    async def resume_generation(self):
        raise AssertionError


class BrokenPause(World):
    """An attribute that is missing has nothing to do with pausing."""

    async def pause_generation(self):
        await super().pause_generation()
        None.post()


@pytest.mark.parametrize("kind", [NoAbort, NotThere, NoMethods, NoResume, NoPause], ids=lambda kind: kind.__name__)
async def test_what_cannot_pause_is_synced_as_before_with_one_warning(kind, caplog):
    _warned.discard(kind)

    for _ in range(2):
        client = kind()
        async with paused_generation(client) as paused:
            assert paused is False
            await client.body()
        if isinstance(client, World):
            assert client.calls == ["pause", "body"]
            assert not client.generation_paused_event.is_set()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name == "megapatch"
    assert f"{kind.__name__} cannot pause generation" in record.message


async def test_what_fails_for_another_reason_is_not_taken_for_that():
    client = BrokenPause()
    with pytest.raises(AttributeError, match="post"):
        async with paused_generation(client):
            raise AssertionError
    assert not client.generation_paused_event.is_set()


def test_it_is_for_one_sync():
    pausing = paused_generation(Plain())
    with pausing:
        pass
    with pytest.raises(MegapatchError, match="make a new one"), pausing:
        pass


def test_a_failed_pause_leaves_a_mark_that_was_there():
    client = World(paused=True)
    client.plan = {"pause, first": "raise"}
    with pytest.raises(Failure):
        asyncio.run(clear_mark_on_failure(World.pause_generation)(client))
    assert client.generation_paused_event.is_set()
