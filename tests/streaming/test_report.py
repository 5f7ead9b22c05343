"""The report of a step to a logger; training continues when that fails."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from rigs.streaming.world import World, failing_after, raised

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


@pytest.mark.parametrize(
    ("result", "told"),
    [(Result(True, 0.5), {"succeeded": True, "grad_norm": 0.5}), (None, None), ([1], None), (Result, None)],
    ids=["dataclass", "none", "list", "class"],
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
