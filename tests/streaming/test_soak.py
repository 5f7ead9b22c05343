"""Ten thousand groups, with random delays and faults at every await: no sample is lost, trained on twice, or
trained on beyond its lag. The truth is written down apart from the pump, where it happens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random

import pytest
from rigs.streaming.world import Fault, flat, run

from megapatch.streaming import EmptyStepError, RolloutBuffer, StreamingConfig, TrainPump

SAMPLES = 2  # of a group


SELDOM = {"abort", "give_back", "pause", "resume", "sync", "stamp", "wait_for_change", "finish"}


class Ledger:
    """The truth: who was sampled from which weights, and what became of it."""

    def __init__(self, max_staleness):
        self.max_staleness = max_staleness
        self.born = {}  # sample -> version of the weights that it was sampled from
        self.trained, self.evicted, self.abandoned = set(), set(), set()
        self.optimizer_steps = 0
        self.lags = []

    def sampled(self, key, version):
        self.born[key] = version
        self.abandoned.discard(key)

    def stepped(self, keys):
        for key in keys:
            lag = self.optimizer_steps - self.born[key]
            assert 0 <= lag <= self.max_staleness, f"{key} is {lag} behind"
            assert key not in self.trained, f"{key} was trained on twice"
            assert key not in self.evicted, f"{key} was trained on after it was evicted"
            self.trained.add(key)
            self.lags.append(lag)
        self.optimizer_steps += 1

    def cleared(self, keys, group_is_oldest):
        """Some may have been cleared before, when the reply was lost."""
        for key in set(keys) - self.trained - self.evicted - self.abandoned:
            assert self.optimizer_steps - group_is_oldest > self.max_staleness, f"{key} was lost"
            self.evicted.add(key)


class Chaos:
    """Random delays, and faults before something is done or after it, when the reply is lost."""

    def __init__(self, seed, faults):
        self.random, self.rate = random.Random(seed), faults
        self.faults = {}

    async def maybe(self, place, slowest=0.0):
        if slowest:
            await asyncio.sleep(self.random.random() * slowest)
        often = 20 if place.split()[1] in SELDOM else 1
        if self.random.random() < self.rate * often:
            self.faults[place] = self.faults.get(place, 0) + 1
            raise Fault(place)


class Trainer:
    def __init__(self, ledger, chaos):
        self.ledger, self.chaos = ledger, chaos
        self.gradients, self.calls_under_way = None, 0

    async def call(self, name, effect, slowest=0.0):
        assert not self.calls_under_way, "calls overlap"
        self.calls_under_way += 1
        try:
            await self.chaos.maybe(f"before {name}", slowest)
            effect()
            if name != "finish":  # a trainer that steps and then fails is not the pump's to know
                await self.chaos.maybe(f"after {name}")
        finally:
            self.calls_under_way -= 1

    async def begin_train_step(self):
        assert self.gradients is None, "begun twice"
        await self.call("begin", lambda: setattr(self, "gradients", []))

    async def prepare_logprobs(self, data, **which):
        await self.call("prepare", lambda: None)
        return data

    async def train_microbatch(self, data):
        assert self.gradients is not None, "not begun"
        await self.call("microbatch", lambda: self.gradients.extend(flat(data)), 0.4)

    async def finish_train_step(self):
        def step():
            self.ledger.stepped(self.gradients)
            self.gradients = None

        await self.call("finish", step, 0.5)

    async def abort_train_step(self):
        await self.call("abort", lambda: setattr(self, "gradients", None))


class Buffer:
    """RolloutBuffer behind a line on which calls and replies get lost."""

    def __init__(self, ledger, chaos):
        self.inner, self.ledger, self.chaos = RolloutBuffer(), ledger, chaos

    async def call(self, name, *args):
        await self.chaos.maybe(f"before {name}")
        result = getattr(self.inner, name)(*args)
        if asyncio.iscoroutine(result):
            result = await result
        await self.chaos.maybe(f"after {name}")
        return result

    def __getattr__(self, name):
        async def method(*args):
            return await self.call(name, *args)

        return method

    async def clear(self, groups):
        await self.chaos.maybe("before clear")
        for group in groups:
            self.ledger.cleared(group.keys, group.weight_version)
        self.inner.clear(groups)
        await self.chaos.maybe("after clear", 0.1)


class Generation:
    """Workers that sample from the weights that were synced. A sync that fails leaves them with mixed ones."""

    def __init__(self, ledger, chaos):
        self.ledger, self.chaos = ledger, chaos
        self.weights = self.version = 0
        self.mixed = self.paused = False
        self.numbers = itertools.count()

    async def pause_generation(self):
        await self.chaos.maybe("before pause")
        self.paused = True
        await self.chaos.maybe("after pause", 0.1)

    async def resume_generation(self):
        await self.chaos.maybe("before resume")
        self.paused = False
        await self.chaos.maybe("after resume")

    async def sync_weights(self):
        await self.chaos.maybe("before sync")
        self.mixed = True
        await self.chaos.maybe("amid sync", 0.5)
        self.mixed, self.weights = False, self.ledger.optimizer_steps
        await self.chaos.maybe("after sync")

    async def set_weight_version(self, version):
        await self.chaos.maybe("before stamp")
        assert version == self.weights
        self.version = version
        await self.chaos.maybe("after stamp")

    async def work(self, pump, buffer, groups, announced):
        while (number := next(self.numbers)) < groups:
            if announced == "with attempts":
                await self.attempts(pump, buffer, number)
                continue
            while not announced and len(buffer) >= 12 * SAMPLES:
                await asyncio.sleep(1)
            async with pump.rollout(number) if announced else contextlib.nullcontext():
                for place in range(SAMPLES):
                    await self.sample(pump, buffer, number, place)

    async def attempts(self, pump, buffer, number):
        while True:
            with contextlib.suppress(Fault):
                async with pump.rollout(number):
                    await self.attempt(pump, buffer, number)
                    return

    async def attempt(self, pump, buffer, number):
        """Roll out a group, or part of it."""
        for place in range(SAMPLES):
            await self.sample(pump, buffer, number, place)
            if place == 0 and self.chaos.random.random() < 0.2:
                self.ledger.abandoned.add((number, place))
                raise Fault("of an engine")

    async def sample(self, pump, buffer, number, place):
        if not pump.admitted:
            await pump.rollouts_permitted()
        assert not self.mixed, "sampled from mixed weights"
        version = self.version  # which may be older than the weights, and not newer
        assert version <= self.weights
        key, tag = (number, place), {"group_id": number, "weight_version": version}
        self.ledger.sampled(key, version)
        dice = self.chaos.random.random()
        if dice < 0.05:
            await buffer.put(key, {**tag, "committed": False}, None)
        await asyncio.sleep(200 * dice if 0.04 < dice < 0.06 else 2 * dice)  # and a long tail
        await buffer.put(key, tag, key)


async def cancel_now_and_then(chaos, steps):
    while True:
        await asyncio.sleep(chaos.random.random() * 100)
        if steps and not steps[-1].done():
            chaos.faults["cancelled"] = chaos.faults.get("cancelled", 0) + 1
            steps[-1].cancel()


async def soak(groups, seed, faults, announced=False, **settings):
    chaos = Chaos(seed, faults)
    ledger = Ledger(settings.get("max_staleness", 0))
    trainer, buffer, generation = Trainer(ledger, chaos), Buffer(ledger, chaos), Generation(ledger, chaos)
    config = StreamingConfig(generations_per_prompt=SAMPLES, refresh_policy_logprobs=True, **settings)
    pump = TrainPump(config, trainer, buffer, generation, generation)
    workers = [asyncio.ensure_future(generation.work(pump, buffer.inner, groups, announced)) for _ in range(12)]
    steps = []
    cancelling = asyncio.ensure_future(cancel_now_and_then(chaos, steps)) if faults else None
    all_in = asyncio.gather(*workers)
    all_in.add_done_callback(lambda _: buffer.inner.close())
    while True:
        steps[:] = [asyncio.ensure_future(pump.step())]
        try:
            await asyncio.shield(steps[0])
        except EmptyStepError:
            if all_in.done():
                break
        except (Fault, asyncio.CancelledError):
            pass
        assert pump.version == ledger.optimizer_steps
        assert asyncio.get_running_loop().time() < 100 * groups, "it does not get on"
    if cancelling:
        cancelling.cancel()
    await all_in
    for _ in range(1000):  # what the last failures have left behind
        try:
            await pump.step()
        except EmptyStepError:
            if trainer.gradients is None:  # or its abort has failed
                break
        except Fault:
            continue
    left = set(buffer.inner.samples())
    assert len(left) == len(buffer.inner), "some are claimed by nobody"
    assert len(left) < config.prompt_groups_per_optimizer_step * SAMPLES
    assert len(ledger.born) == groups * SAMPLES
    assert ledger.trained | ledger.evicted | left == ledger.born.keys(), "some were lost"
    assert not left & (ledger.trained | ledger.evicted)
    assert trainer.gradients is None and not generation.paused
    return ledger, chaos


@pytest.fixture(autouse=True)
def _without_its_log(caplog):
    caplog.set_level(logging.CRITICAL, logger="megapatch")


FAULTY = SELDOM | {"begin", "prepare", "microbatch", "changes", "samples", "claim", "clear"}


def test_ten_thousand_groups():
    settings = {"target_prompt_groups_per_step": 8}
    ledger, chaos = run(
        soak(10_000, seed=1, faults=0.003, max_staleness=4, train_global_batch_size=4 * SAMPLES, **settings)
    )
    places = {f"{when} {call}" for call in FAULTY for when in ("before", "after")}
    assert chaos.faults.keys() == places - {"after finish"} | {"amid sync", "cancelled"}
    assert set(ledger.lags) == {0, 1, 2, 3, 4} and ledger.evicted
    assert len(ledger.trained) > 10_000


@pytest.mark.parametrize("seed", [2, 3])
def test_many_more_faults(seed):
    ledger, chaos = run(soak(300, seed, faults=0.01, target_prompt_groups_per_step=3, max_staleness=seed))
    assert len(ledger.trained) > 100 and len(chaos.faults) > 25


def test_several_groups_a_call():
    settings = {"target_prompt_groups_per_step": 8, "prompt_groups_per_microbatch": 3, "max_staleness": 3}
    ledger, chaos = run(soak(500, seed=6, faults=0.005, **settings))
    assert len(ledger.trained) > 500 and len(chaos.faults) > 20


def test_strictly_on_policy_nothing_is_trained_on_late():
    ledger, _ = run(soak(1000, seed=4, faults=0.001, target_prompt_groups_per_step=3))
    assert set(ledger.lags) == {0}
    assert ledger.evicted and ledger.trained


def test_no_rollout_that_was_announced_is_evicted():
    settings = {"target_prompt_groups_per_step": 4, "train_global_batch_size": 2 * SAMPLES}
    ledger, chaos = run(soak(500, seed=5, faults=0.005, announced=True, max_staleness=3, **settings))
    assert not ledger.evicted and len(ledger.trained) > 900
    assert len(ledger.lags) == len(ledger.trained) and max(ledger.lags) > 0 and len(chaos.faults) > 20


def test_attempts_that_failed_leave_nothing():
    settings = {"target_prompt_groups_per_step": 4, "max_staleness": 2}
    ledger, chaos = run(soak(500, seed=7, faults=0.005, announced="with attempts", **settings))
    assert len(ledger.trained) > 800 and not ledger.abandoned and len(chaos.faults) > 20
