"""A wait of ten minutes is a warning, which says which part waits for which."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest
from rigs.streaming.rollouts import begun
from rigs.streaming.world import World

from megapatch.streaming import RolloutBuffer, StreamingConfig, TrainPump, _calls

HANGS = {
    "begin": "World.begin_train_step()",
    "microbatch": "World.train_microbatch()",
    "finish": "World.finish_train_step()",
    "prepare": "World.prepare_logprobs()",
    "changes": "World.changes()",
    "samples": "World.samples()",
    "claim": "World.claim()",
    "clear": "World.clear()",
    "sync": "World.sync_weights()",
    "stamp": "World.set_weight_version()",
    "pause": "a weight sync, in which World is paused and resumed",
    "resume": "a weight sync, in which World is paused and resumed",
    "wait": "a prompt group to train on",
}


def warnings(caplog):
    """Return the texts of the warnings, without the addresses at their ends."""
    records = [record for record in caplog.records if record.levelno == logging.WARNING]
    return [record.getMessage().partition(" (see ")[0] for record in records]


@pytest.mark.parametrize("call", HANGS)
async def test_the_call_that_hangs_is_named_once(caplog, call):
    world = World({f"before {call}": lambda: asyncio.sleep(3000)})
    pump = world.pump(refresh_policy_logprobs=True)
    if call == "wait":
        asyncio.get_running_loop().call_later(10, asyncio.ensure_future, world.put("a"))
    else:
        await world.put("a")
    await pump.step()
    assert world.trained == [["a"]]
    told = f"the pump has been waiting for {HANGS[call]} for 600 seconds. Waiting: "
    assert sum(text.startswith(told) for text in warnings(caplog)) == 1


@pytest.mark.parametrize("call", HANGS)
async def test_nothing_is_said_before(caplog, call):
    world = await World.of("a", {f"{when} {call}": lambda: asyncio.sleep(590) for when in ("before",)})
    await world.pump(refresh_policy_logprobs=True).step()
    assert not warnings(caplog)


async def test_what_waits_for_the_call_is_listed(caplog):
    world, pump, rollouts = await begun(
        World({"before microbatch": lambda: asyncio.sleep(1000)}), max_staleness=1, groups="abcdef"
    )
    await world.put("z")
    stepping = asyncio.ensure_future(pump.step())
    await asyncio.sleep(50)
    await rollouts.end("a")
    await asyncio.sleep(700)
    stepping.cancel()
    (text,) = warnings(caplog)
    assert "Waiting: 0 samples in 0 prompt groups" in text
    assert text.endswith("3 rollouts in flight, the oldest for 601 s; 2 rollouts wait to begin")


def test_plain_functions_in_their_threads_too(caplog, monkeypatch):
    monkeypatch.setattr(_calls, "PATIENCE", 0.02)
    heard = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: heard.set()

    class Trainer:
        def begin_train_step(self): ...

        def train_microbatch(self, data):
            heard.wait(60)

        def finish_train_step(self): ...

        def abort_train_step(self): ...

    async def main():
        world, buffer = World(), RolloutBuffer()
        await buffer.put("a", {"group_id": "a", "weight_version": 0}, "a")
        pump = TrainPump(StreamingConfig(generations_per_prompt=1), Trainer(), buffer, world, world)
        await pump.step()

    logging.getLogger("megapatch").addHandler(handler)
    try:
        asyncio.run(main())
    finally:
        logging.getLogger("megapatch").removeHandler(handler)
    assert any("Trainer.train_microbatch() for 0 seconds" in text for text in warnings(caplog))
