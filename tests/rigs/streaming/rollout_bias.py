"""The samples that each policy trains on, simulated: log-normal rollouts, a trainer, and a pump, on virtual time.

python -m rigs.streaming.rollout_bias    prints the table of docs/streaming.md
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from dataclasses import dataclass

from megapatch.streaming import RolloutBuffer, StreamingConfig, TrainPump

from .world import run

WORKERS, GROUPS, STEPS, WARM_UP = 48, 16, 150, 20
MEDIAN, SPREAD = 2.0, 1.0  # seconds, and the standard deviation of their logarithm
MICROBATCH, SYNC = 0.02, 0.2  # seconds
CASES = (
    *(("windowed", 0), ("windowed", 1), ("ready_first", 1)),
    *(("weight_fifo", 0), ("weight_fifo", 1), ("weight_fifo", 4), ("weight_fifo", 8)),
)


@dataclass
class Outcome:
    """Of the rollouts after the warm-up: how long they took, and what became of them."""

    generated: list[float]
    trained: list[float]
    evicted: int
    seconds_per_step: float

    @property
    def thrown_away(self) -> float:
        return self.evicted / (self.evicted + len(self.trained))

    def row(self) -> list[str]:
        durations = [f"{mean(these):.1f} ({p90(these):.1f})" for these in (self.generated, self.trained)]
        return [*durations, f"{self.thrown_away:.0%}", f"{self.seconds_per_step:.1f}"]


class World:
    """A trainer and generation, which note their own deeds, apart from the pump."""

    def __init__(self):
        self.version = 0
        self.duration_of = {}
        self.generated, self.trained = [], []
        self.measured_from = math.inf

    async def begin_train_step(self):
        pass

    async def train_microbatch(self, data):
        await asyncio.sleep(MICROBATCH)
        (group,) = data
        if self.version >= WARM_UP:
            self.trained.append(self.duration_of[group])

    async def finish_train_step(self):
        pass

    async def abort_train_step(self):
        pass

    async def pause_generation(self):
        pass

    async def resume_generation(self):
        pass

    async def sync_weights(self):
        await asyncio.sleep(SYNC)

    async def set_weight_version(self, version):
        self.version = version
        if version == WARM_UP:
            self.measured_from = asyncio.get_running_loop().time()

    async def work(self, pump, buffer, numbers, permit):
        while True:
            group = next(numbers)
            async with permit(pump, group):
                version = self.version
                seconds = random.Random(group).lognormvariate(math.log(MEDIAN), SPREAD)
                await asyncio.sleep(seconds)
                self.duration_of[group] = seconds
                if self.version >= WARM_UP:
                    self.generated.append(seconds)
                await buffer.put(group, {"group_id": group, "weight_version": version}, group)


def announced(pump, group):
    return pump.rollout(group)


class Evictions:
    """A logger that counts them."""

    def __init__(self):
        self.evicted = 0

    def log_metrics(self, metrics, step, prefix):
        if prefix == "streaming" and step > WARM_UP:
            self.evicted += metrics["evicted_prompt_groups"]


async def simulate(pick, max_staleness, permit=announced, steps=STEPS, **settings):
    world, buffer, logger = World(), RolloutBuffer(), Evictions()
    config = StreamingConfig(
        generations_per_prompt=1,
        target_prompt_groups_per_step=GROUPS,
        max_staleness=max_staleness,
        pick=pick,
        **settings,
    )
    pump = TrainPump(config, world, buffer, world, world, logger=logger)
    numbers = itertools.count()
    workers = [asyncio.ensure_future(world.work(pump, buffer, numbers, permit)) for _ in range(WORKERS)]
    await pump.run(steps)
    assert not any(worker.done() for worker in workers)
    seconds = asyncio.get_running_loop().time() - world.measured_from
    return Outcome(world.generated, world.trained, logger.evicted, seconds / (steps - WARM_UP))


def table(outcomes):
    """Return the lines of the table in docs/streaming.md."""
    head = ["`pick`", "`max_staleness`", "generated, s", "trained, s", "thrown away", "a step, s"]
    rows = [[f"`{pick}`", str(staleness), *outcome.row()] for (pick, staleness), outcome in outcomes.items()]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def mean(values):
    return sum(values) / len(values)


def p90(values):
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


if __name__ == "__main__":
    print(*table({case: run(simulate(*case)) for case in CASES}), sep="\n")
