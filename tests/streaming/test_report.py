"""The report of a step to a logger, and the warning of a wait of ten minutes, which says what waits for what."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
from rigs.streaming.rollouts import begun
from rigs.streaming.world import World, failing_after, raised

from megapatch.streaming import RolloutBuffer, StreamingConfig, TrainPump, _calls
from megapatch.streaming.nemo_rl import _reduced


class Logger:
    def __init__(self):
        self.logged = []

    def log_metrics(self, metrics, step, prefix):
        self.logged.append((step, prefix, metrics))


class AsyncLogger(Logger):
    async def log_metrics(self, metrics, step, prefix):
        await asyncio.sleep(1)
        super().log_metrics(metrics, step, prefix)


async def one_step(world, **settings):
    await world.put("old", version=3)
    await world.put("new", version=5)
    await world.put("stale", version=1)
    await world.pump(target_prompt_groups_per_step=2, max_staleness=2, version=5, **settings).step()


@pytest.mark.parametrize("kind", [Logger, AsyncLogger])
async def test_metrics_and_seconds_by_phase(kind):
    world = World(
        {
            "before samples": lambda: asyncio.sleep(1),
            "before claim": lambda: asyncio.sleep(2),
            "before microbatch": lambda: asyncio.sleep(30),
            "before finish": lambda: asyncio.sleep(4),
            "before sync": lambda: asyncio.sleep(5),
        }
    )
    logger = kind()
    await one_step(world, logger=logger)
    assert [(step, prefix) for step, prefix, _ in logger.logged] == [
        *[(6, "train"), (6, "streaming"), (6, "timing/train"), (6, "timing/train")]
    ]
    train, streaming, timing, sync = (metrics for *_, metrics in logger.logged)
    assert train == {"loss": 1.0}
    assert list(streaming.items()) == [
        *[("prompt_groups", 2), ("samples", 2), ("evicted_prompt_groups", 1)],
        *[("max_lag", 2), ("mean_lag", 1), ("rollouts_begun", 0)],
    ]
    assert {phase: seconds for phase, seconds in timing.items() if seconds} == {
        "wait_for_rollouts": 1,  # there is nothing new to look at for the second
        "claim": 4,
        "train_microbatch": 60,
        "wait_for_trainer": 60 - 2,  # less what was done beside the first
        "finish_train_step": 4,
        "optimizer_step": 3 + 60 + 4,
    }
    assert sync == {"sync_weights": 5, "set_weight_version": 0}


async def test_what_a_failed_step_took_is_not_the_next_ones():
    async def slowly_failing():
        await asyncio.sleep(100)
        world.plan.clear()
        raise KeyError

    world, logger = World({"before microbatch": slowly_failing}), Logger()
    await world.put("a")
    pump = world.pump(logger=logger)
    with pytest.raises(KeyError):
        await pump.step()
    await pump.step()
    assert logger.logged[2][2]["optimizer_step"] == 0


async def test_what_a_failed_step_took_is_not_that_of_a_sync_by_hand():
    world, logger = World({"before microbatch": failing_after(100)}), Logger()
    await world.put("a")
    pump = world.pump(logger=logger)
    assert await raised(pump.step())
    await pump.sync_weights()
    assert logger.logged == [(0, "timing/train", {"sync_weights": 0, "set_weight_version": 0})]


@dataclass
class Result:
    succeeded: bool
    grad_norm: float


_done = Future()
_done.set_result(0.5)


@pytest.mark.parametrize(
    ("result", "told"),
    [
        *[(Result(True, 0.5), {"succeeded": True, "grad_norm": 0.5}), ({"loss": _done}, {"loss": 0.5})],
        *[(None, None), ([1], None), (Result, None)],
    ],
    ids=["dataclass", "a future in a dict", "none", "list", "class"],
)
async def test_what_finish_returns(result, told):
    class Trainer(World):
        async def finish_train_step(self):
            await super().finish_train_step()
            return result

    logger = Logger()
    await one_step(Trainer(), logger=logger)
    found = [metrics for _, prefix, metrics in logger.logged if prefix == "train"]
    assert found == ([told] if told else [])


class BrokenLogger:
    def log_metrics(self, metrics, step, prefix):
        raise OSError("disk full")


class CancelledLogger:
    async def log_metrics(self, metrics, step, prefix):
        raise asyncio.CancelledError


@pytest.mark.parametrize("broken", [BrokenLogger(), CancelledLogger(), object()], ids=lambda it: type(it).__name__)
async def test_training_goes_on_without_a_logger_and_that_is_said_once(broken, caplog):
    world = await World.of("a", version=0)
    await world.put("b", version=1)
    await world.pump(logger=broken).run(2)
    assert world.trained == [["a"], ["b"]]
    assert caplog.text.count("training continues") == 1
    assert "Traceback" in caplog.text


class LazyTrainer(World):
    """Its metrics are of a device that is gone."""

    class Metrics(Mapping):
        def __iter__(self):
            yield "loss"

        def __len__(self):
            return 1

        def __getitem__(self, name):
            raise RuntimeError("the device is gone")

    async def finish_train_step(self):
        await super().finish_train_step()
        return self.Metrics()


async def test_metrics_that_cannot_be_read(caplog):
    world, logger = LazyTrainer(), Logger()
    await one_step(world, logger=logger)
    assert [prefix for _, prefix, _ in logger.logged] == ["streaming", "timing/train", "timing/train"]
    assert world.called()[-1] == "resume" and caplog.text.count("training continues") == 1


# --------------------------------------------------------------- NeMo-RL's rules for the metrics of microbatches
def test_infinite_extremes_do_not_count_and_without_others_there_is_minus_one():
    result = {
        "loss": 2,
        "grad_norm": None,
        "all_mb_metrics": {
            "probs_ratio_min": [0.5, math.inf, 0.25],
            "probs_ratio_max": [1.5, -math.inf, 1.25],
            "probs_ratio_clamped_min": [math.inf],
            "num_valid_samples": [3, 4],
            "lr": [0.1, 0.3],
        },
    }
    assert _reduced(result) == {
        "loss": 2.0,
        "probs_ratio_min": 0.25,
        "probs_ratio_max": 1.5,
        "probs_ratio_clamped_min": -1.0,
        "num_valid_samples": 7.0,
        "lr": 0.2,
    }


# ------------------------------------------------------------------------ waits of ten minutes
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
