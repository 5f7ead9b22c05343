"""What a TrainPump costs beside the same calls made by hand, and what it gains.

    python benchmarks/streaming.py

calls        a step of groups that are all there: at least 0.98 of the throughput of the trainer's calls alone
event loop   how late others in it are woken up while a plain trainer works: at most 0.1 of how late they are when
             the trainer is called in the loop
rollouts     a step of groups that arrive one by one: less time than training when the last one is there

The trainer sleeps, as one that waits for a GPU does. The kinds take turns in one process; exits with 1 when a
promised ratio is broken. Needs megapatch alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time

from megapatch.streaming import RolloutBuffer, StreamingConfig, TrainPump

GROUPS, MICROBATCH, APART = 16, 0.05, 0.04  # seconds: of a microbatch, and from one group to the next
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


class Generation:
    """Has its weights already."""

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
    """Median seconds that a sleep of a millisecond takes too long meanwhile."""
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


def compare(title, measure, this, other, limit):
    """Prints the ratio of the medians; whether it is at most the limit."""
    rounds = [(asyncio.run(measure(this)), asyncio.run(measure(other))) for _ in range(ROUNDS)]
    one, two = (statistics.median(values) for values in zip(*rounds, strict=True))
    kept = one / two <= limit
    verdict = "kept" if kept else "BROKEN"
    print(f"{title:12} {one * 1e3:8.2f} ms, {two * 1e3:8.2f} ms: {one / two:.3f}; at most {limit:.3f}: {verdict}")
    return kept


async def blocked():
    """A microbatch at a time, in the loop, which gets its turn in between."""
    trainer = Trainer()
    for number in range(GROUPS):
        trainer.train_microbatch(number)
        await asyncio.sleep(0)


def main() -> int:
    kept = [
        compare("calls", seconds, pumped, called, 1 / 0.98),
        compare("event loop", lateness, pumped, blocked, 0.1),
        compare("rollouts", seconds, streaming, all_at_once, 1.0),
    ]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
