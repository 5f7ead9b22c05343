"""A run that is killed at random points, and each time goes on from its checkpoint on disk.

python -m rigs.streaming.killed_runs FOLDER KILLS

A life is a process of its own, forked, that kills itself with SIGKILL at a random await or amid a save. Samples
are files in a store; the buffer and its state have their paths. Each deed is written to a log as it happens,
apart from the pump, and is judged here when the last life has ended.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import signal
import sys
import traceback
from pathlib import Path

from megapatch.streaming import RolloutBuffer, StreamingConfig, TrainPump

from .world import run

SAMPLES, GROUPS, STALENESS, WORKERS, STEPS_AFTER = 2, 3, 2, 6, 3  # the last: steps of the life that is not killed
LONGEST = 200  # points of a life; a step takes about 60


class Killer:
    """Ends the process at its n-th point; None: never."""

    def __init__(self, points):
        self.left = points

    def point(self):
        if self.left is not None:
            self.left -= 1
            if self.left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)


class Life:
    """Trainer, synchronizer, generation, and the loop that saves after each step."""

    def __init__(self, folder, killer, seed):
        self.folder, self.killer, self.random = folder, killer, random.Random(seed)
        self.buffer = RolloutBuffer()
        config = StreamingConfig(
            generations_per_prompt=SAMPLES, target_prompt_groups_per_step=GROUPS, max_staleness=STALENESS
        )
        self.pump = TrainPump(config, self, self.buffer, self, self)
        self.trained = []  # the weights: for each step the samples with the version that they were sampled from
        self.gradients = None
        self.served = None  # version of generation's weights
        self.next_prompt, self.again = 0, []

    def log(self, *words):
        with open(self.folder / "log", "ab", buffering=0) as file:
            file.write(f"{' '.join(map(str, words))}\n".encode())

    async def pause(self, slowest=0.1):
        self.killer.point()
        await asyncio.sleep(self.random.random() * slowest)
        self.killer.point()

    # ------------------------------------------------------------------------------------------ trainer
    async def begin_train_step(self):
        self.gradients = []
        await self.pause()

    async def train_microbatch(self, paths):
        for path in paths:
            self.gradients.append(pickle.loads(Path(path).read_bytes()))
        await self.pause(0.5)

    async def finish_train_step(self):
        await self.pause()
        self.trained.append(self.gradients)
        self.gradients = None

    async def abort_train_step(self):
        raise AssertionError("nothing fails here")

    # ------------------------------------------------------------------------------------------ generation
    async def pause_generation(self):
        self.killer.point()

    async def resume_generation(self):
        self.killer.point()

    async def sync_weights(self):
        await self.pause()

    async def set_weight_version(self, version):
        assert version == len(self.trained), "the version is not that of the weights"
        self.served = version

    def take_prompt(self):
        if self.again:
            return self.again.pop(0)
        self.next_prompt += 1
        return self.next_prompt - 1

    async def work(self):
        while True:
            group = self.take_prompt()
            async with self.pump.rollout(group):
                self.log("rolls out", group)
                assert self.served is not None, "a rollout began before generation had weights"
                for number in range(SAMPLES):
                    born = self.served
                    await self.pause(self.random.lognormvariate(0, 1))
                    path = self.folder / "store" / f"{group}-{number}-{os.getpid()}"
                    path.write_bytes(pickle.dumps((group, number, born)))
                    tag = {"group_id": group, "weight_version": born}
                    await self.buffer.put((group, number), tag, str(path))

    # ------------------------------------------------------------------------------------------ checkpoints
    async def load(self):
        try:
            saved = pickle.loads((self.folder / "checkpoint").read_bytes())
        except FileNotFoundError:
            self.log("starts", 0, "with")
            await self.pump.sync_weights()
            return
        self.trained, self.next_prompt = saved["weights"], saved["next_prompt"]
        self.again = await self.pump.load_state_dict(saved["pump"])
        assert self.pump.version == len(self.trained)
        complete = {tag["group_id"] for tag in self.buffer.samples().values()}
        done = {group for step in self.trained for group, _, _ in step}
        assert not complete & done, "a group is in the weights and in the buffer"
        assert sorted([*complete, *done, *self.again]) == list(range(self.next_prompt)), "a prompt was lost"
        self.log("starts", len(self.trained), "with", *sorted(complete | done))

    async def save(self):
        state = await self.pump.state_dict()
        saved = {"weights": self.trained, "next_prompt": self.next_prompt, "pump": state}
        content, new = pickle.dumps(saved), self.folder / "new"
        with open(new, "wb", buffering=0) as file:
            file.write(content[: len(content) // 2])
            self.killer.point()
            file.write(content[len(content) // 2 :])
        self.killer.point()
        os.replace(new, self.folder / "checkpoint")
        self.killer.point()
        kept = {data for _, _, data in state["buffer"]["samples"]}
        for path in (self.folder / "store").iterdir():  # those that no checkpoint needs any more
            if str(path) not in kept and int(path.name.split("-")[0]) in self.groups_in_weights():
                path.unlink()

    def groups_in_weights(self):
        return {group for step in self.trained for group, _, _ in step}

    async def live(self, steps):
        await self.load()
        workers = [asyncio.ensure_future(self.work()) for _ in range(WORKERS)]
        training = asyncio.ensure_future(self.train(steps))
        done, _ = await asyncio.wait([training, *workers], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def train(self, steps):
        for _ in range(steps):
            await self.pump.step()
            await self.save()


def fork(folder, points, seed, steps):
    """Live in a forked process, and return how that ended."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    code = 1
    try:
        run(Life(folder, Killer(points), seed).live(steps))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def judge(folder):
    """Return the numbers of groups trained on, of versions at which lives began, and of rollouts; or raise."""
    saved = pickle.loads((folder / "checkpoint").read_bytes())
    keys = [(group, number) for step in saved["weights"] for group, number, _ in step]
    assert len(keys) == len(set(keys)), "a sample was trained on twice"
    for version, step in enumerate(saved["weights"]):
        assert len(step) == GROUPS * SAMPLES
        lags = [version - born for _, _, born in step]
        assert min(lags) >= 0 and max(lags) <= STALENESS, lags
    starts, done, repeated = [], set(), 0
    for line in (folder / "log").read_text().splitlines():
        word, *rest = line.split()
        if word == "starts":
            starts.append(int(rest[0]))
            done = set(map(int, rest[2:]))
        else:
            assert int(rest[1]) not in done, f"{rest[1]} was rolled out again, and was not in flight"
            repeated += 1
    assert starts == sorted(starts), "a later life began with older weights"
    return len({group for group, _ in keys}), len(set(starts)), repeated


def main():
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    (folder / "store").mkdir()
    chance = random.Random(28)
    killed = 0
    while killed < kills:
        status = fork(folder, chance.randrange(1, LONGEST), chance.random(), steps=1000)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"a life ended with {status}"
        killed += 1
    assert fork(folder, None, chance.random(), STEPS_AFTER) == 0
    print(killed, *judge(folder))


if __name__ == "__main__":
    main()
