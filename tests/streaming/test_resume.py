"""A run that was killed goes on from its checkpoint, and loses at most what was in flight."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random

import pytest
from rigs.streaming.world import World, raised

from megapatch import MisuseError
from megapatch.streaming import RolloutBuffer, StreamingConfig, TrainPump


class SavingWorld(World):
    """A buffer elsewhere, which can save what it has."""

    async def state_dict(self):
        return await self.do("state", self.buffer.state_dict)

    async def load_state_dict(self, state):
        await self.do("load", lambda: self.buffer.load_state_dict(state))


async def saved(pump):
    """Return the pump's state as it comes back from a file."""
    return pickle.loads(pickle.dumps(await pump.state_dict()))


async def resumed(state, **settings):
    world = SavingWorld()
    pump = world.pump(**settings)
    return world, pump, await pump.load_state_dict(state)


async def roll_out(world, pump, group, seconds=0.0, **tag):
    async with pump.rollout(group):
        await asyncio.sleep(seconds)
        await world.put(group, version=world.generation_version, **tag)


SAMPLES, GROUPS, STALENESS, WORKERS = 2, 3, 2, 6


class Life:
    """Trainer, synchronizer and generation from a checkpoint on, which has the weights and the pump's state.

    Its weights are the samples of each step: (group, number, version that it was sampled from).
    """

    def __init__(self, saved, seed):
        self.random, self.saved = random.Random(seed), saved
        self.trained, self.next_prompt, state = pickle.loads(saved) if saved else ([], 0, None)
        self.buffer, self.state, self.served = RolloutBuffer(), state, None
        settings = {"target_prompt_groups_per_step": GROUPS, "max_staleness": STALENESS}
        config = StreamingConfig(generations_per_prompt=SAMPLES, **settings)
        self.pump = TrainPump(config, self, self.buffer, self, self)
        self.began, self.done, self.again, self.rolled_out = len(self.trained), set(), [], 0

    async def pause(self, slowest=0.1):
        await asyncio.sleep(self.random.random() * slowest)

    pause_generation = resume_generation = sync_weights = pause

    async def begin_train_step(self):
        self.gradients = []
        await self.pause()

    async def train_microbatch(self, samples):
        self.gradients += samples
        await self.pause(0.5)

    async def finish_train_step(self):
        await self.pause()
        self.trained.append(self.gradients)

    def abort_train_step(self): ...

    async def set_weight_version(self, version):
        assert version == len(self.trained), "the version is not that of the weights"
        self.served = version

    async def work(self):
        while True:
            if not self.again:
                self.again, self.next_prompt = [self.next_prompt], self.next_prompt + 1
            group = self.again.pop(0)
            async with self.pump.rollout(group):
                assert group not in self.done, "it was rolled out again, and was not in flight"
                assert self.served is not None, "a rollout began before generation had weights"
                self.rolled_out += 1
                for number in range(SAMPLES):
                    sample = group, number, self.served
                    await self.pause(self.random.lognormvariate(0, 1))
                    tag = {"group_id": group, "weight_version": sample[2]}
                    await self.buffer.put(sample[:2], tag, sample)

    async def load(self):
        if self.state is None:
            await self.pump.sync_weights()
            return
        self.again = await self.pump.load_state_dict(self.state)
        assert self.pump.version == len(self.trained)
        complete = {tag["group_id"] for tag in self.buffer.samples().values()}
        in_weights = {group for step in self.trained for group, _, _ in step}
        assert not complete & in_weights, "a group is in the weights and in the buffer"
        self.done = complete | in_weights
        assert sorted([*self.done, *self.again]) == list(range(self.next_prompt)), "a prompt was lost"

    async def live(self):
        await self.load()
        workers = [asyncio.ensure_future(self.work()) for _ in range(WORKERS)]
        try:
            while not any(worker.done() for worker in workers):
                await self.pump.step()
                self.saved = pickle.dumps((self.trained, self.next_prompt, await self.pump.state_dict()))
        finally:
            for worker in workers:
                worker.cancel()
            ends = await asyncio.gather(*workers, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


async def test_a_run_that_ends_a_hundred_times_loses_what_was_in_flight_only():
    """Nothing of a life is left for the next one but what it has saved last."""
    chance, saved, lives = random.Random(28), None, []
    for _ in range(100):
        lives.append(Life(saved, chance.random()))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(lives[-1].live(), chance.uniform(0, 12))
        saved = lives[-1].saved
    trained, _, _ = pickle.loads(saved)
    keys = [(group, number) for step in trained for group, number, _ in step]
    assert len(keys) == len(set(keys)) == len(trained) * GROUPS * SAMPLES
    lags = {version - born for version, step in enumerate(trained) for _, _, born in step}
    assert lags == {*range(STALENESS + 1)}
    begun = [life.began for life in lives]
    assert begun == sorted(begun) and len(set(begun)) > 50  # and not always before the first save
    assert sum(life.rolled_out for life in lives) > len(keys) / SAMPLES + 200  # those in flight, again


async def test_the_version_and_complete_groups_go_on():
    world = SavingWorld()
    pump = world.pump(generations_per_prompt=2, max_staleness=1)
    await world.put_each("abc", samples=2)
    await pump.step()
    other, resumed_pump, again = await resumed(await saved(pump), generations_per_prompt=2, max_staleness=1)
    assert resumed_pump.version == 1 and again == []
    assert list(other.buffer.samples()) == ["b0", "b1", "c0", "c1"]
    await resumed_pump.step()
    assert other.trained == [["b0", "b1"]] and resumed_pump.version == 2


async def test_no_rollout_begins_before_generation_has_the_weights_and_the_step_syncs_first():
    pump = SavingWorld().pump(version=3)
    world, pump, _ = await resumed(await saved(pump))
    rolling = asyncio.ensure_future(roll_out(world, pump, "a"))
    await asyncio.sleep(1)
    assert not pump.admitted and not len(world.buffer)
    await pump.step()
    await rolling
    assert world.called("stamp", "microbatch") == ["stamp 3", "microbatch a", "stamp 4"]


async def test_a_failed_step_is_undone_first_and_its_advantages_are_not_computed_again():
    computed = []

    async def advantages(data):
        computed.append(data[0])
        return [f"{data[0]}!"]

    world = await SavingWorld.of("a", {"before microbatch": "raise", "before give_back": "raise"})
    pump = world.pump(compute_advantages=advantages)
    assert await raised(pump.step()) and not world.buffer.samples()
    other, pump, _ = await resumed(await saved(pump), compute_advantages=advantages)
    assert world.called("give_back") == ["give_back a"]
    await pump.step()
    assert other.trained == [["a!"]] and computed == ["a"]


async def test_trained_groups_whose_clearing_failed_are_not_saved():
    world = await SavingWorld.of("ab", {"before clear": "raise"})
    pump = world.pump(max_staleness=1)
    assert await raised(pump.step())
    world, pump, _ = await resumed(await saved(pump), max_staleness=1)
    await pump.step()
    assert world.trained == [["b"]] and pump.version == 2


async def test_a_buffer_without_state_keeps_its_own():
    world = await World.of("ab")
    pump = world.pump(max_staleness=1)
    await pump.step()
    state = await saved(pump)
    assert "buffer" not in state
    other = World()
    other.buffer = world.buffer
    pump = other.pump(max_staleness=1)
    assert await pump.load_state_dict(state) == []
    await pump.step()
    assert other.trained == [["b"]] and pump.version == 2


@pytest.mark.parametrize("state", [{}, {"format": 2}, None])
async def test_another_format_is_refused(state):
    for load in (RolloutBuffer().load_state_dict, SavingWorld().pump().load_state_dict):
        with pytest.raises(MisuseError, match=r"has the format .*; expected 1"):
            await load(state) if load.__qualname__.startswith("TrainPump") else load(state)


async def test_loading_into_what_is_in_use_is_refused():
    world = await SavingWorld.of("a")
    pump = world.pump()
    state = await saved(pump)
    with pytest.raises(MisuseError, match="has had samples already"):
        await pump.load_state_dict(state)
    await pump.step()
    with pytest.raises(MisuseError, match="in use already"):
        await pump.load_state_dict(state)
    world = SavingWorld()
    pump = world.pump()
    async with pump.rollout("b"):
        with pytest.raises(MisuseError, match="in use already"):
            await pump.load_state_dict(state)
    with pytest.raises(MisuseError, match=r"has no load_state_dict\(\)"):
        await World().pump().load_state_dict(state)


async def test_neither_while_a_step_runs():
    pump = SavingWorld().pump()
    stepping = asyncio.ensure_future(pump.step())
    await asyncio.sleep(1)
    for call in (pump.state_dict(), pump.load_state_dict({})):
        with pytest.raises(MisuseError, match=r"while step\(\) of this pump is running"):
            await call
    stepping.cancel()


# ------------------------------------------------------------------------------------- rollouts in a saved state
async def failing(world, pump, group):
    async with pump.rollout(group):
        await world.put(group)
        raise ConnectionError


async def test_groups_in_flight_come_back_to_be_rolled_out_again():
    """Those that run, that have arrived in part, that wait; not those that a filter has dropped."""
    world = SavingWorld()
    pump = world.pump(generations_per_prompt=2, target_prompt_groups_per_step=2, max_staleness=1)
    await world.put("half", samples=1)
    await world.put("strange", samples=3)
    async with pump.rollout("filtered"):
        pass
    async with pump.rollout("done"):
        await world.put("done", samples=2)
    async with pump.rollout("partly"):
        await world.put("partly")
    assert await raised(failing(world, pump, "failed"))
    tasks = [asyncio.ensure_future(roll_out(world, pump, group, 99)) for group in ("runs", "waits")]
    await asyncio.sleep(1)
    other, _, again = await resumed(await saved(pump), generations_per_prompt=2)
    assert again == ["partly", "runs", "waits", "half", "strange", "failed"]
    assert list(other.buffer.samples()) == ["done0", "done1"]
    for task in tasks:
        task.cancel()


async def test_rollouts_that_wait_in_the_buffer_still_count():
    """With a fresh count too many would begin, and some could not be trained on."""
    world, begun = SavingWorld(), []
    settings = {"target_prompt_groups_per_step": 2, "max_staleness": 1}
    pump = world.pump(**settings)
    for group in "abc":
        await roll_out(world, pump, group)
    world, pump, _ = await resumed(await saved(pump), **settings)
    await pump.sync_weights()

    async def begin(group):
        async with pump.rollout(group):
            begun.append(group)
            await world.put(group)

    tasks = [asyncio.ensure_future(begin(group)) for group in "defg"]
    await asyncio.sleep(1)
    assert begun == ["d"] and pump._rollouts.take_begun() == 1
    await pump.step()
    await asyncio.sleep(1)
    assert begun == ["d", "e", "f"] and world.trained == [["a", "b"]]
    tasks[-1].cancel()


async def test_a_rollout_keeps_the_version_of_its_weights():
    """One that is too old is evicted after the load as before it."""
    world = SavingWorld()
    pump = world.pump(version=5, max_staleness=2)
    world.generation_version = 5
    await roll_out(world, pump, "a")
    _, pump, _ = await resumed(await saved(pump), max_staleness=2)
    assert [rollout.version for rollout in pump._rollouts._rollouts.values()] == [5]


async def test_new_rollouts_have_the_version_of_the_state():
    """They are not taken for older ones, which training would wait for."""
    world, pump, _ = await resumed(await saved(SavingWorld().pump(version=3)), max_staleness=0)
    await pump.sync_weights()
    running = asyncio.ensure_future(roll_out(world, pump, "runs", 1e6))
    await asyncio.sleep(1)
    await world.put("is there", version=3)
    await asyncio.wait_for(pump.step(), 100)
    assert world.trained == [["is there"]]
    running.cancel()
