"""A wait of ten minutes is a warning, which says which part waits for which."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest
from rigs.streaming.rollouts import begun
from rigs.streaming.world import World, cancelled_after

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
    "pause": "the pause of World",
    "resume": "the resume of World",
}


def warnings(caplog):
    """Return the texts of the warnings, without the addresses at their ends."""
    records = [record for record in caplog.records if record.levelno == logging.WARNING]
    return [record.getMessage().partition(" (see ")[0] for record in records]


@pytest.mark.parametrize("call", HANGS)
async def test_the_call_that_hangs_is_named_once(caplog, call):
    world = World({f"before {call}": lambda: asyncio.sleep(3000)})
    await world.put("a")
    await world.pump(refresh_policy_logprobs=True).step()
    assert world.trained == [["a"]]
    (text,) = warnings(caplog)
    assert text.startswith(f"the pump waits for {HANGS[call]}, which has not returned for 600 seconds. Waiting: ")


@pytest.mark.parametrize("call", HANGS)
async def test_nothing_is_said_before(caplog, call):
    world = World({f"{when} {call}": lambda: asyncio.sleep(590) for when in ("before",)})
    await world.put("a")
    await world.pump(refresh_policy_logprobs=True).step()
    assert not warnings(caplog)


async def waiting_step(pump, rollouts):
    """Begin a step, end the rollout of group a, and give up after 700 seconds."""
    stepping = asyncio.ensure_future(pump.step())
    await rollouts.end("a")
    await asyncio.sleep(700)
    stepping.cancel()


async def test_what_waits_for_the_call_is_listed(caplog):
    world, pump, rollouts = await begun(
        World({"before microbatch": lambda: asyncio.sleep(1000)}), max_staleness=1, groups="abcdef"
    )
    await world.put("z")
    await waiting_step(pump, rollouts)
    (text,) = warnings(caplog)
    assert "Waiting: 0 samples in 0 prompt groups" in text
    assert "3 rollouts in flight, the oldest for 60" in text
    assert text.endswith(
        "2 rollouts wait to begin, because 4 have begun, and no more can be trained on (max_staleness)"
    )


@pytest.mark.parametrize(
    ("settings", "capacity", "why"),
    [
        ({"max_rollouts_in_flight": 1}, None, "1 are running (max_rollouts_in_flight)"),
        ({"max_staleness": 9}, 2, "the buffer holds no more (max_prompt_groups=2)"),
        ({}, None, "2 have begun, and no more can be trained on (max_staleness)"),
        ({"max_rollouts_in_flight": 3}, 3, "2 have begun, and no more can be trained on (max_staleness)"),
    ],
)
async def test_why_rollouts_wait_to_begin(caplog, settings, capacity, why):
    world = World()
    if capacity:
        world.max_prompt_groups = capacity
    _, pump, _ = await begun(world, groups="abcd", **settings)
    await cancelled_after(700, pump.step(), times=1)
    (text,) = warnings(caplog)
    assert text.startswith("no prompt group to train on for 600 seconds") and text.endswith(f"because {why}")


async def test_a_group_that_training_has_is_not_in_the_buffer(caplog):
    world = World()
    world.max_prompt_groups = 2
    _, pump, rollouts = await begun(world, groups="abcd", max_staleness=0)
    await waiting_step(pump, rollouts)
    (text,) = warnings(caplog)
    assert text.endswith("because 2 have begun, and no more can be trained on (max_staleness)")


async def test_the_oldest_of_the_rollouts_in_flight_is_the_one_that_began_first(caplog):
    _, pump, rollouts = await begun(groups="", max_staleness=1)
    for group in "ab":
        await asyncio.sleep(50)
        rollouts.begin(group)
    await cancelled_after(700, pump.step(), times=1)
    (text,) = warnings(caplog)
    assert "2 rollouts in flight, the oldest for 650 s" in text


async def test_rollouts_that_wait_for_a_sync(caplog):
    world = World({"before sync": lambda: asyncio.sleep(700)})
    pump = world.pump()
    syncing = asyncio.ensure_future(pump.sync_weights())
    await asyncio.sleep(1)

    async def roll_out():
        async with pump.rollout("a"):
            pass

    rolling = asyncio.ensure_future(roll_out())
    await syncing
    await rolling
    (text,) = warnings(caplog)
    assert text.endswith("1 rollouts wait to begin, because weights are being synced, or could not be")


async def test_calls_of_put_that_wait_are_counted(caplog):
    world, buffer = World(), RolloutBuffer(max_prompt_groups=1)
    config = StreamingConfig(generations_per_prompt=2)
    pump = TrainPump(config, world, buffer, world, world)
    await buffer.put("half", {"group_id": "half", "weight_version": 0}, "half")
    putting = asyncio.ensure_future(buffer.put("other", {"group_id": "other", "weight_version": 0}, "other"))
    await cancelled_after(700, pump.step(), times=1)
    assert buffer.waiting_puts == 1
    putting.cancel()
    await asyncio.wait([putting])
    assert buffer.waiting_puts == 0
    (text,) = warnings(caplog)
    assert text.endswith("1 put() calls wait for room in the buffer")


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
    assert any("Trainer.train_microbatch(), which has not" in text for text in warnings(caplog))
