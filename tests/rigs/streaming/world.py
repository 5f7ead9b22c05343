"""A trainer, a buffer, a synchronizer and generation without weights, on an event loop with virtual time.

Their calls are recorded in the order in which they were done. A call may fail before it is done, or after, as when
a reply is lost.
"""

from __future__ import annotations

import asyncio
import itertools

from megapatch.streaming import RolloutBuffer, StreamingConfig, TrainPump


class Fault(Exception):
    """The text is the place where it was raised."""


class Deadlock(Exception):
    """Nothing is left that could wake up a task, or tasks wake each other up forever."""


class VirtualClock(asyncio.SelectorEventLoop):
    """An event loop whose sleeps take no time. Not for threads: while one works, the loop sees nothing to do."""

    def __init__(self):
        super().__init__()
        self.now, turns = 0.0, itertools.count(1)

        def select(timeout=None):
            if timeout is None or next(turns) % 1_000_000 == 0:  # the soak takes 200,000
                raise Deadlock
            self.now += timeout
            return []

        self._selector.select = select

    def time(self):
        return self.now


def run(main):
    """Do what asyncio.run() does, on a virtual clock."""
    loop = VirtualClock()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(_cancel_the_rest())
        loop.close()


async def _cancel_the_rest():
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


class World:
    """Trainer, buffer, synchronizer and generation in one, for a pump; the test provides the samples.

    plan   what happens at which point: "raise", "cancel" (of `victim`), or a coroutine function
    """

    def __init__(self, plan=None):
        self.plan = plan or {}
        self.calls, self.reached = [], []
        self.buffer = RolloutBuffer()
        self.victim = None
        self.is_open = False
        self.gradients = []  # keys of samples of the open step
        self.trained = []  # keys, step by step
        self.generation_version = 0
        self.paused = False

    @classmethod
    async def of(cls, groups, plan=None, **options):
        """Return a world with these groups in its buffer."""
        world = cls(plan)
        await world.put_each(groups, **options)
        return world

    def pump(self, **settings):
        for_the_pump = {"compute_advantages", "logger", "version"} & settings.keys()
        others = {name: settings.pop(name) for name in for_the_pump}
        config = StreamingConfig(**{"generations_per_prompt": 1, **settings})
        self.made = TrainPump(config, self, self, self, self, **others)
        return self.made

    async def put(self, group, version=0, samples=1, committed=True, **tag):
        for number in range(samples):
            tag = {"group_id": group, "weight_version": version, "committed": committed, **tag}
            key = group if samples == 1 else f"{group}{number}"
            await self.buffer.put(key, tag, key)

    async def put_each(self, groups, **options):
        for group in groups:
            await self.put(group, **options)

    async def point(self, place):
        self.reached.append(place)
        deed = self.plan.get(place)
        if deed == "raise":
            del self.plan[place]
            raise Fault(place)
        if deed == "cancel":
            del self.plan[place]
            self.victim.cancel()
        elif callable(deed):
            await deed()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def do(self, call, effect=lambda: None, told=""):
        await self.point(f"before {call}")
        self.calls.append(call + told)
        result = effect()
        await self.point(f"after {call}")
        return result

    # ------------------------------------------------------------------------------------------ a trainer
    async def begin_train_step(self):
        assert not self.is_open, "begun twice"
        await self.do("begin", lambda: self._set(open=True))

    async def train_microbatch(self, data):
        assert self.is_open, "no step is open"
        keys = flat(data)
        await self.do("microbatch", lambda: self.gradients.extend(keys), f" {' '.join(keys)}")

    async def finish_train_step(self):
        assert self.is_open, "no step is open"

        def step():
            self.trained.append(self.gradients)
            self._set(open=False)
            return {"loss": 1.0}

        return await self.do("finish", step)

    async def abort_train_step(self):
        await self.do("abort", lambda: self._set(open=False))

    async def prepare_logprobs(self, data, **which):
        return await self.do("prepare", lambda: data, f" {' '.join(flat(data))}")

    def _set(self, open):
        self.is_open, self.gradients = open, []

    # ------------------------------------------------------------------------------------------ a buffer
    async def changes(self):
        return await self.do("changes", self.buffer.changes)

    async def samples(self):
        return await self.do("samples", self.buffer.samples)

    async def wait_for_change(self, seen):
        await self.point("before wait")
        self.calls.append("wait")
        found = await self.buffer.wait_for_change(seen)
        await self.point("after wait")
        return found

    async def claim(self, group):
        return await self.do("claim", lambda: self.buffer.claim(group), f" {group.group_id}")

    async def give_back(self, groups):
        await self.do("give_back", lambda: self.buffer.give_back(groups), names(groups))

    async def clear(self, groups):
        await self.do("clear", lambda: self.buffer.clear(groups), names(groups))

    # ------------------------------------------------------------------------------------------ generation
    async def pause_generation(self):
        await self.do("pause", lambda: setattr(self, "paused", True))

    async def resume_generation(self):
        await self.do("resume", lambda: setattr(self, "paused", False))

    async def sync_weights(self):
        await self.do("sync", told=f" {len(self.trained)}")

    async def set_weight_version(self, version):
        await self.do("stamp", lambda: setattr(self, "generation_version", version), f" {version}")

    def called(self, *which):
        """Return the calls that begin with one of these words, or all that do more than look."""
        looks = {"changes", "samples", "wait"}
        if which:
            return [call for call in self.calls if call.split()[0] in which]
        return [call for call in self.calls if call not in looks]


class Streaming(list):
    """A logger that keeps the metrics of each step under the prefix "streaming"."""

    def log_metrics(self, metrics, step, prefix):
        if prefix == "streaming":
            self.append(metrics)


def flat(data):
    """Return the samples of a prompt group, or of several."""
    return [sample for item in data for sample in (item if isinstance(item, list) else [item])]


def names(groups):
    return "".join(f" {group.group_id}" for group in groups)


async def raised(awaitable):
    """Return the exception that it raises, caught inside its task."""
    try:
        await awaitable
    except BaseException as error:
        return error
    return None


async def cancelled_after(seconds, awaitable, times=3):
    """Return the exception that it raises when cancelled `times` times, every `seconds` seconds."""
    task = asyncio.ensure_future(raised(awaitable))
    for _ in range(times):
        await asyncio.sleep(seconds)
        task.cancel()
    return await task


def failing_after(seconds):
    """Return a coroutine function for a plan."""

    async def fail():
        await asyncio.sleep(seconds)
        raise Fault("the reason")

    return fail
