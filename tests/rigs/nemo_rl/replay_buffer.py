"""NeMo-RL's own replay buffer as the buffer of a pump; without a checkout, our imitation of it."""

import asyncio
import importlib
from pathlib import Path

import pytest

from megapatch.errors import MisuseError
from megapatch.streaming import Group, StreamingConfig, TrainPump
from megapatch.streaming.nemo_rl import InFlightUpdates, TQBuffer
from megapatch.testing import init_parallel
from rigs.nemo_rl.worker import CHECKOUT, IMITATIONS

REPLAY_BUFFER = "nemo_rl.algorithms.async_utils.replay_buffer"
has_replay_buffer = (
    "class TQReplayBuffer" in Path(CHECKOUT or IMITATIONS, f"{REPLAY_BUFFER.replace('.', '/')}.py").read_text()
)
needs_replay_buffer = pytest.mark.skipif(not has_replay_buffer, reason="this NeMo-RL has no TQReplayBuffer")


class Recorder:
    """A trainer of the keys that it gets; the data plane, of which it knows what it holds."""

    def __init__(self):
        self.steps, self.open, self.held = [], [], []

    def put_samples(self, sample_ids, **ignored):
        self.held += sample_ids

    def clear_samples(self, sample_ids, partition_id):
        self.held = [name for name in self.held if name not in sample_ids]

    def begin_train_step(self):
        self.open = []

    def train_microbatch(self, meta):
        self.open.append([name.rpartition("_g")[2] for name in meta.sample_ids])

    def finish_train_step(self):
        self.steps.append(self.open)

    def abort_train_step(self): ...


class Manager:
    """Rolls prompts out as NeMo-RL's RolloutManager does: a slot for each attempt, and a rollout that may fail."""

    def __init__(self, buffer):
        self.buffer, self.failing, self.told = buffer, 0, [0]

    def sync_weights(self): ...

    def set_weight_version(self, version):
        self.told.append(version)

    async def generate_and_push(self, record):
        while True:
            attempt = self.buffer.reserve(weight_version=self.told[-1])
            await asyncio.sleep(0.001)
            if self.failing:
                self.failing -= 1
                await self.buffer.remove_group(attempt)
                continue
            versions = {"start_weight_version": self.told[-1], "end_weight_version": self.told[-1]}
            return await self.buffer.commit(attempt, record, **versions)


def made():
    module = importlib.import_module(REPLAY_BUFFER)
    recorder = Recorder()
    if CHECKOUT:  # which would tensorize a rollout's messages
        module.record_to_train_batch = lambda record, pad_value_dict: record
        module.pack_payload = lambda batch, weight_version, group_id: (
            [f"{group_id}_g{number}" for number in range(batch.size)],
            {},
            [{}] * batch.size,
        )
    return recorder, TQBuffer(module.TQReplayBuffer(recorder, "train", pad_value_dict={}))


def record_of(size):
    return importlib.import_module("rigs.nemo_rl.worker").batch(0, size, rank=0)


def filled(rank, world_size):
    init_parallel()
    return asyncio.run(steps_of_a_buffer()), asyncio.run(parts_of_a_buffer())


async def steps_of_a_buffer():
    """Four prompts, the first of which fails twice, trained on in two steps."""
    recorder, buffer = made()
    manager = Manager(buffer)
    manager.failing = 2
    config = StreamingConfig(generations_per_prompt=2, target_prompt_groups_per_step=2)
    pump = TrainPump(config, recorder, buffer, manager, InFlightUpdates(manager))

    async def roll_out(number):
        async with pump.rollout(number):
            with buffer.rolling_out(number):
                await manager.generate_and_push(record_of(2))

    await asyncio.gather(pump.run(2), *map(roll_out, range(4)))
    return {"steps": recorder.steps, "held": recorder.held, "slots": len(buffer.meta_list), "told": manager.told}


async def parts_of_a_buffer():
    """Reserve, commit, claim, give back and clear, one by one; return the results."""
    recorder, buffer = made()
    with buffer.rolling_out("prompt"):
        attempt = buffer.reserve(weight_version=3)
    found = {"reserved": list(buffer.samples().values()), "changes": [buffer.changes()]}
    waiting = asyncio.ensure_future(buffer.wait_for_change(buffer.changes()))
    await asyncio.sleep(0)
    meta = await buffer.commit(attempt, record_of(2), start_weight_version=3, end_weight_version=4)
    found["woken"], found["tags"] = await waiting, list(buffer.samples().values())
    group = Group("prompt", tuple(buffer.samples()), 3)
    found["claimed"] = buffer.claim(group) is meta, dict(buffer.samples())
    try:
        buffer.claim(group)
    except MisuseError as error:
        found["twice"] = str(error)
    buffer.give_back([group])
    found["given back"] = tuple(buffer.samples()) == group.keys
    with buffer.rolling_out("another"):
        other = buffer.reserve(weight_version=4)
    for _ in range(2):
        await buffer.clear([group])
    found["left"] = [tag["group_id"] for tag in buffer.samples().values()]
    await buffer.remove_group(other)
    found["held"] = recorder.held, buffer._prompts, buffer._claimed, len(buffer.ready_list)
    buffer.close()
    found["closed"] = await buffer.wait_for_change(buffer.changes())
    buffer.ready_list.append(True)
    try:
        buffer.samples()
    except ValueError as error:
        found["lists of two lengths"] = str(error)
    return found
