"""Reinforcement learning that trains as rollouts arrive: out of order, late, and with their version.

    python examples/streaming_rl.py

Runs on CPU, without Ray, in four processes and well under a minute. Two ranks train Megatron's GPT in
DistributedDataParallel and one process samples from the weights that it was sent last, both to be found in
streaming_rl_processes.py; this one runs the TrainPump. The task is to alternate: an even token is rewarded after
an odd one, and an odd one after an even one. There are three runs:

streaming     rollouts may be a few versions behind
on-policy     none may be behind (max_staleness=0); groups are still trained on one by one, as they arrive
synchronous   the groups of the on-policy run once more, each step in one call of Megatron's own schedule. It has
              to come to the same parameters.

Exits with 0 if the streaming runs have learned it, and the last two are equal; else with 1. Needs
megapatch[demo], and for the plot megapatch[example].
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import multiprocessing
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, wait

from streaming_rl_processes import RANKS, SAMPLES, VOCAB, Policy, Remote, Sampler

from megapatch.streaming import RolloutBuffer, StreamingConfig, TrainPump

GROUPS = 4  # of an optimizer step
LEARNED = 0.8  # mean reward of a token; by chance it is 0.5


class Trainer:
    """Both ranks as one trainer, which writes down what it was trained on."""

    def __init__(self, ranks):
        self.ranks, self.threads = ranks, ThreadPoolExecutor(len(ranks))
        self.step, self.steps = [], []

    def on_all(self, method, *args):
        """The results, by rank, when all are done; then one that failed may raise."""
        calls = [self.threads.submit(rank.call, method, *args) for rank in self.ranks]
        wait(calls)
        return [call.result() for call in calls]

    def begin_train_step(self):
        self.on_all("begin_train_step")
        self.step = []

    def train_microbatch(self, data):
        self.on_all("train_microbatch", data)
        self.step.append(data)

    def finish_train_step(self):
        result = self.on_all("finish_train_step")[0]
        self.steps.append(self.step)
        return result

    def abort_train_step(self):
        self.on_all("abort_train_step")

    def loss(self, groups):
        return self.on_all("loss", groups)[0]

    def weights(self):
        return self.on_all("weights")[0]


class Generation:
    """The sampler's process, as the pump sees it. While it is paused, no request is under way."""

    def __init__(self, sampler, trainer):
        self.sampler, self.trainer = sampler, trainer
        self.free = asyncio.Lock()

    async def pause_generation(self):
        await self.free.acquire()

    async def resume_generation(self):
        self.free.release()

    def sync_weights(self):
        self.sampler.call("load", self.trainer.weights())

    def set_weight_version(self, version):
        self.sampler.call("set_weight_version", version)

    async def sample(self, prompt, seed):
        async with self.free:
            return await asyncio.to_thread(self.sampler.call, "sample", prompt, seed)


async def roll_out(pump, generation, buffer, chance):
    """Prompt group after prompt group, each of whose samples takes its time. Some are late."""
    while True:
        await pump.rollouts_permitted()
        prompt, group_id = chance.randrange(VOCAB), chance.getrandbits(32)
        version, samples = await generation.sample(prompt, seed=group_id)

        async def arrive(place, tokens, tag):
            await asyncio.sleep(chance.uniform(0.1, 0.3) if chance.random() < 0.02 else chance.uniform(0, 0.02))
            await buffer.put((tag["group_id"], place), tag, tokens)

        tag = {"group_id": group_id, "weight_version": version}
        await asyncio.gather(*(arrive(place, tokens, tag) for place, tokens in enumerate(samples)))


def rewards(tokens):
    return [float(before % 2 != token % 2) for before, token in itertools.pairwise(tokens)]


def advantages(samples):
    """(tokens, how much more each was rewarded than those of its group in the same place)"""
    rewarded = [rewards(tokens) for tokens in samples]
    means = [sum(place) / len(samples) for place in zip(*rewarded, strict=True)]
    return samples, [[one - mean for one, mean in zip(row, means, strict=True)] for row in rewarded]


def mean_reward(groups):
    every = [reward for samples, _ in groups for tokens in samples for reward in rewards(tokens)]
    return sum(every) / len(every)


class Lags:
    """A logger."""

    def __init__(self):
        self.worst = self.evicted = 0
        self.means = []

    def log_metrics(self, metrics, step, prefix):
        if prefix == "streaming":
            self.worst = max(self.worst, metrics["max_lag"])
            self.evicted += metrics["evicted_prompt_groups"]
            self.means.append(metrics["mean_lag"])


async def train(name, ranks, sampler, steps, max_staleness):
    """From the first weights; what each step was trained on."""
    trainer = Trainer(ranks)
    trainer.on_all("start_anew")
    buffer, lags, chance = RolloutBuffer(max_prompt_groups=2 * GROUPS), Lags(), random.Random(0)
    generation = Generation(sampler, trainer)
    config = StreamingConfig(
        generations_per_prompt=SAMPLES,
        target_prompt_groups_per_step=GROUPS,
        max_staleness=max_staleness,
    )
    pump = TrainPump(
        config,
        trainer,
        buffer,
        generation,
        generation,
        compute_advantages=advantages,
        logger=lags,
        terminal=sys.stderr,
    )
    begun = time.perf_counter()
    await pump.sync_weights()
    workers = [asyncio.create_task(roll_out(pump, generation, buffer, chance)) for _ in range(GROUPS)]
    running = asyncio.create_task(pump.run(steps))
    done, _ = await asyncio.wait([running, *workers], return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()  # raises what has failed
    for worker in workers:
        worker.cancel()
    await asyncio.wait(workers)
    print(
        f"{name}: {steps} optimizer steps in {time.perf_counter() - begun:.1f} s on rollouts at most {lags.worst} "
        f"and on average {sum(lags.means) / steps:.2f} versions behind; {lags.evicted} groups came too late"
    )
    return trainer


def show(curves):
    """A line for each tenth of the steps."""
    print("\nmean reward".ljust(16) + "".join(name.ljust(32) for name in curves))
    steps = len(next(iter(curves.values())))
    edges = sorted({round(steps * tenth / 10) for tenth in range(11)})
    for begin, end in itertools.pairwise(edges):
        means = [sum(curve[begin:end]) / (end - begin) for curve in curves.values()]
        bars = "".join(f"{mean:.2f} {'#' * round(24 * mean)}".ljust(32) for mean in means)
        print(f"{begin + 1:5} to {end:<5}  {bars}".rstrip())


def plot(curves, path):
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        print("\nno plot: matplotlib is not installed; pip install megapatch[example]")
        return
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    for name, curve in curves.items():
        pyplot.plot(range(1, len(curve) + 1), curve, label=name)
    pyplot.xlabel("optimizer step")
    pyplot.ylabel("mean reward of a token")
    pyplot.legend()
    pyplot.savefig(path)
    print(f"\nplot: {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25, help="optimizer steps of each run (default: 25)")
    parser.add_argument("--max-staleness", type=int, default=2, help="of the streaming run (default: 2)")
    parser.add_argument("--plot", default="streaming_rl.png", help="where to (default: streaming_rl.png)")
    told = parser.parse_args()

    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed"])
    with tempfile.TemporaryDirectory() as folder:
        ranks = [Remote(Policy, rank, f"{folder}/ranks") for rank in range(RANKS)]
        sampler = Remote(Sampler, f"{folder}/sampler")
        streaming = asyncio.run(train("streaming", ranks, sampler, told.steps, told.max_staleness))
        on_policy = asyncio.run(train("on-policy", ranks, sampler, told.steps, 0))
        first = on_policy.steps[0]
        weights, loss = on_policy.weights(), on_policy.loss(first)
        on_policy.on_all("train_synchronously", on_policy.steps)
        expected, expected_loss = on_policy.weights(), on_policy.loss(first)

    curves = {
        name: [mean_reward(groups) for groups in run.steps]
        for name, run in {"streaming": streaming, "on-policy": on_policy}.items()
    }
    show(curves)
    plot(curves, told.plot)
    largest = max(float(abs(weights[name] - expected[name]).max()) for name in expected)
    print(f"\nloss of the first groups in the end: on-policy {loss:.6f}, synchronous {expected_loss:.6f}")
    print(f"largest difference of a parameter: {largest:.1e}")
    tail = max(1, told.steps // 10)
    learned = all(sum(curve[-tail:]) / tail >= LEARNED for curve in curves.values())
    print(f"{'learned' if learned else 'not learned'}, {'equal' if largest <= 1e-6 else 'not equal'}")
    return 0 if learned and largest <= 1e-6 else 1


if __name__ == "__main__":
    sys.exit(main())
