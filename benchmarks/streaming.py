"""Measure what a TrainPump costs compared with the same calls made by hand, and what it gains.

    python benchmarks/streaming.py

calls        a step of groups that have all arrived: at least 0.98 of the throughput of only the trainer's calls
event loop   how late other tasks wake up while a plain trainer works: at most 0.1 of how late they are when the
             trainer is called in the event loop
rollouts     a step of groups that arrive one by one: less time than training once the last has arrived
arrivals     the event loop's work for 16,384 samples of one step that arrive one by one: at most 32 times that for
             1,024, so at most twice as much a sample

The trainer sleeps, as a trainer that waits for a GPU does, but for the arrivals, where it does nothing. The two
sides take turns in one process. Exits with 1 if a promise is broken. Needs only megapatch.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time

from megapatch.streaming import RolloutBuffer, StreamingConfig, TrainPump

GROUPS, MICROBATCH, APART = 16, 0.05, 0.04  # seconds: per microbatch, and between two groups
SAMPLES = 8  # of a group that arrives one by one
ROUNDS = 5


class Trainer:
    def begin_train_step(self):
        pass

    def train_microbatch(self, data):
        time.sleep(MICROBATCH)

    def finish_train_step(self):
        pass

    def abort_train_step(self):
        pass


class IdleTrainer(Trainer):
    async def train_microbatch(self, data):
        pass


class Generation:
    """A generation side that already has the weights."""

    async def pause_generation(self):
        pass

    async def resume_generation(self):
        pass

    def set_weight_version(self, version):
        pass

    def sync_weights(self):
        pass


async def put(buffer, apart=0.0):
    for number in range(GROUPS):
        await asyncio.sleep(apart)
        await buffer.put(number, {"group_id": number, "weight_version": 0}, number)


def by_hand(trainer):
    trainer.begin_train_step()
    for number in range(GROUPS):
        trainer.train_microbatch(number)
    trainer.finish_train_step()


def pump_for(buffer):
    config = StreamingConfig(generations_per_prompt=1, target_prompt_groups_per_step=GROUPS)
    generation = Generation()
    return TrainPump(config, Trainer(), buffer, generation, generation)


async def pumped():
    buffer = RolloutBuffer()
    await put(buffer)
    await pump_for(buffer).step()


async def called():
    by_hand(Trainer())


async def streaming():
    buffer = RolloutBuffer()
    await asyncio.gather(put(buffer, APART), pump_for(buffer).step())


async def all_at_once():
    await put(RolloutBuffer(), APART)
    by_hand(Trainer())


async def lateness(work):
    """Return by how many seconds (median) a sleep of a millisecond is late while this work runs."""
    late = []

    async def tick():
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(0.001)
            late.append(time.perf_counter() - begun - 0.001)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    late.clear()
    await work()
    await asyncio.sleep(0.002)
    ticking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await ticking
    return statistics.median(late)


async def seconds(work):
    begun = time.perf_counter()
    await work()
    return time.perf_counter() - begun


def compare(title, measure, this, other, limit, rounds=ROUNDS):
    """Print the ratio of the medians, and return whether it is at most the limit."""
    rounds = [(asyncio.run(measure(this)), asyncio.run(measure(other))) for _ in range(rounds)]
    ours, theirs = (statistics.median(values) for values in zip(*rounds, strict=True))
    kept = ours / theirs <= limit
    verdict = "kept" if kept else "BROKEN"
    times = f"{ours * 1e3:8.2f} ms, {theirs * 1e3:8.2f} ms"
    print(f"{title:12} {times}: {ours / theirs:.3f}; at most {limit:.3f}: {verdict}")
    return kept


async def blocked():
    """Train in the event loop, which gets a turn between two microbatches."""
    trainer = Trainer()
    for number in range(GROUPS):
        trainer.train_microbatch(number)
        await asyncio.sleep(0)


def arrivals(number):
    """Return a program in which this number of samples arrive one by one, and make a step."""

    async def arrive():
        buffer, generation = RolloutBuffer(), Generation()
        config = StreamingConfig(generations_per_prompt=SAMPLES, target_prompt_groups_per_step=number // SAMPLES)
        step = asyncio.ensure_future(TrainPump(config, IdleTrainer(), buffer, generation, generation).step())
        for key in range(number):  # of no group all, before the last ones come
            await buffer.put(key, {"group_id": key % (number // SAMPLES), "weight_version": 0}, key)
            await asyncio.sleep(0.0001)  # the pump comes to wait for the next one
        await step

    return arrive


async def work(program):
    """Return the processor seconds of a program: where the pump rests, it works for others."""
    begun = time.process_time()
    await program()
    return time.process_time() - begun


def main() -> int:
    kept = [
        compare("calls", seconds, pumped, called, 1 / 0.98),
        compare("event loop", lateness, pumped, blocked, 0.1),
        compare("rollouts", seconds, streaming, all_at_once, 1.0),
        compare("arrivals", work, arrivals(16_384), arrivals(1_024), 32.0, rounds=1),
    ]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
