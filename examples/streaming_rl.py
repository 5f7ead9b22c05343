"""Train as rollouts arrive, and measure what that gains over on-policy training.

    python examples/streaming_rl.py

Runs on CPU without Ray in about half a minute. Two runs train the same model (Megatron's GPT on two data-parallel
ranks) from the same weights, with the same number of steps, samples per step and rollout workers. They run at the
same time, so a busy machine slows both:

on-policy   max_staleness=0. Each step trains on its prompt groups as they arrive, and waits for the slowest. A
            worker is idle from the end of its group until the next weights have arrived.
streaming   Groups may be up to --max-staleness versions behind, so a worker starts on the next one instead.

The model learns to alternate odd and even tokens. As in real runs, rollouts take longer than training on them,
and their durations have a long tail (log-normal). Workers sleep for that time, so it costs no CPU. Rollout number
n has the same prompt, seed and durations in both runs.

The example exits with 1, and says why, unless streaming reaches a mean reward of 0.9 at least 1.2 times as fast
as on-policy training (in seconds since training began) and ends at most 0.05 below it. The plot shows rewards by
time and by samples: per sample, stale rollouts are worth a little less. As a check, Megatron's own schedule trains
on the groups of the on-policy run again, one call per step, and must come to the same parameters.

In a checkout: pip install ".[example]"; without matplotlib, ".[demo]", there is no plot.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import itertools
import random
import sys
import tempfile
import time

import _streaming_rl_processes as processes
from _streaming_rl_processes import SAMPLES, VOCAB, advantages, mean_reward

from megapatch.streaming import RolloutBuffer, StreamingConfig, TrainPump

GROUPS = 4  # prompt groups per optimizer step, and rollout workers
SPREAD = 0.8  # sigma of the log-normal durations: of the prompts, and of the samples of a prompt
GOAL, SPEED_UP, TOLERANCE = 0.9, 1.2, 0.05  # GOAL and TOLERANCE: mean reward of a token, which is 0.5 by chance
WINDOW = 5  # optimizer steps over which rewards are averaged


class Run:
    """The record of a run, and the pump's logger."""

    def __init__(self, name, trainer, steps):
        self.name, self.trainer, self.steps = name, trainer, steps
        self.begun = time.perf_counter()
        self.seconds, self.rewards = [], []  # per optimizer step: its end, and the mean reward of its samples
        self.max_lag = self.evicted = 0
        self.mean_lags = []

    def log_metrics(self, metrics, step, prefix):
        if prefix != "streaming":
            return
        self.seconds.append(time.perf_counter() - self.begun)
        self.rewards.append(mean_reward(self.trainer.steps[-1]))
        self.max_lag = max(self.max_lag, metrics["max_lag"])
        self.mean_lags.append(metrics["mean_lag"])
        self.evicted += metrics["evicted_prompt_groups"]
        if step % WINDOW == 0 or step == self.steps:
            reward = self.averaged()[-1]
            text = f"{self.seconds[-1]:5.1f} s  {self.name:9}  step {step:2}  mean reward {reward:.2f}"
            print(f"{text} {'#' * round(24 * reward)}", flush=True)

    def __str__(self):
        mean_lag = sum(self.mean_lags) / len(self.mean_lags)
        return (
            f"{self.name}: {self.steps} steps in {self.seconds[-1]:.1f} s, on rollouts at most {self.max_lag} and "
            f"on average {mean_lag:.2f} versions behind; {self.evicted} groups came too late"
        )

    def averaged(self):
        """Return for each step the mean reward of the last WINDOW steps."""
        windows = (self.rewards[max(0, end - WINDOW) : end] for end in range(1, len(self.rewards) + 1))
        return [sum(window) / len(window) for window in windows]

    def seconds_to_goal(self):
        """Return when the averaged reward first reached GOAL, or None if it never did."""
        reached = zip(self.seconds, self.averaged(), strict=True)
        return next((seconds for seconds, reward in reached if reward >= GOAL), None)


class Generation:
    """The generation side as the pump sees it. No request is in progress while it is paused."""

    def __init__(self, sampler, run):
        self.sampler, self.run = sampler, run
        self.free, self.paused = asyncio.Lock(), False

    async def pause_generation(self):
        await self.free.acquire()
        self.paused = True

    async def resume_generation(self):
        if self.paused:  # not if the pause was cancelled while it waited
            self.paused = False
            self.free.release()

    def sync_weights(self):
        self.sampler.call("load", self.run.trainer.weights())

    async def set_weight_version(self, version):
        await asyncio.to_thread(self.sampler.call, "set_weight_version", version)

    async def sample(self, prompt, seed):
        async with self.free:
            return await asyncio.to_thread(self.sampler.call, "sample", prompt, seed)


async def roll_out(pump, generation, buffer, numbers, latency):
    """Roll out one prompt group after the other. Its samples arrive in the buffer one by one."""
    while True:
        number = next(numbers)
        async with pump.rollout(number):
            chance = random.Random(number)  # the n-th rollout is the same in each run, up to the weights
            prompt, seed = chance.randrange(VOCAB), chance.getrandbits(32)
            version, samples = await generation.sample(prompt, seed)
            difficulty = chance.lognormvariate(0, SPREAD)
            durations = [latency * difficulty * chance.lognormvariate(0, SPREAD) for _ in samples]
            tag = {"group_id": number, "weight_version": version}
            places = zip(range(SAMPLES), samples, durations, strict=True)
            await asyncio.gather(*(arrive(buffer, tag, *place) for place in places))


async def arrive(buffer, tag, place, sample, seconds):
    await asyncio.sleep(seconds)
    await buffer.put((tag["group_id"], place), tag, sample)


async def complete(tasks, when):
    """Wait for tasks, cancel the others and wait for them too. Raises what a task raised."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=when)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def train(name, trainer, sampler, steps, max_staleness, latency):
    """Train for `steps` optimizer steps with one rollout worker per group of a step."""
    run, buffer = Run(name, trainer, steps), RolloutBuffer()
    generation = Generation(sampler, run)
    config = StreamingConfig(
        generations_per_prompt=SAMPLES,
        target_prompt_groups_per_step=GROUPS,
        max_staleness=max_staleness,
    )
    pump = TrainPump(config, trainer, buffer, generation, generation, compute_advantages=advantages, logger=run)
    await pump.sync_weights()
    numbers = itertools.count()
    workers = [asyncio.create_task(roll_out(pump, generation, buffer, numbers, latency)) for _ in range(GROUPS)]
    running = asyncio.create_task(pump.run(steps))
    await complete([running, *workers], asyncio.FIRST_COMPLETED)
    return run


def judge(streaming, on_policy):
    """Return the speed-up, None where a run did not reach GOAL, and the reason why the claim fails, or None."""
    ours, theirs = streaming.seconds_to_goal(), on_policy.seconds_to_goal()
    for run, seconds in ((on_policy, theirs), (streaming, ours)):
        if seconds is None:
            return None, f"{run.name} did not reach a mean reward of {GOAL} in {len(run.rewards)} steps"
    speed_up = theirs / ours
    if speed_up < SPEED_UP:
        return speed_up, (
            f"streaming reached a mean reward of {GOAL} in {ours:.1f} s, which is not {SPEED_UP} times as fast as "
            f"on-policy in {theirs:.1f} s"
        )
    last, other = streaming.averaged()[-1], on_policy.averaged()[-1]
    if last < other - TOLERANCE:
        return speed_up, (
            f"streaming ended at a mean reward of {last:.2f}, more than {TOLERANCE} below on-policy's {other:.2f}"
        )
    return speed_up, None


def plot(runs, title, path):
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, (by_time, by_samples) = pyplot.subplots(1, 2, sharey=True, figsize=(10, 4.2), layout="constrained")
    figure.suptitle(title)
    for run, color in zip(runs, ("tab:blue", "tab:orange"), strict=True):
        samples = [GROUPS * SAMPLES * step for step in range(1, len(run.rewards) + 1)]
        for axes, places in ((by_time, run.seconds), (by_samples, samples)):
            axes.plot(places, run.rewards, ".", color=color, alpha=0.35)
            axes.plot(places, run.averaged(), color=color, label=run.name)
    for axes, label in ((by_time, "time [s]"), (by_samples, "samples trained on")):
        axes.axhline(GOAL, color="gray", linewidth=0.8, linestyle="--")
        axes.set_xlim(left=0)
        axes.set_xlabel(label)
        axes.grid(alpha=0.25)
    by_time.set_ylabel("mean reward of a token")
    by_time.legend(title=f"mean of {WINDOW} steps; dots: one step", loc="lower right")
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


async def train_both(trainers, samplers, options):
    shared = {"steps": options.steps, "latency": options.latency}
    runs = [
        train("streaming", trainers[0], samplers[0], max_staleness=options.max_staleness, **shared),
        train("on-policy", trainers[1], samplers[1], max_staleness=0, **shared),
    ]
    tasks = [asyncio.create_task(run) for run in runs]
    await complete(tasks, asyncio.FIRST_EXCEPTION)
    return [task.result() for task in tasks]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of each run (default: 30)")
    parser.add_argument(
        "--max-staleness", type=int, default=2, help="versions streaming may lag behind (default: 2)"
    )
    parser.add_argument("--latency", type=float, default=0.055, help="median seconds of a sample (default: 0.055)")
    parser.add_argument("--plot", default="streaming_rl.png", help="file of the plot (default: streaming_rl.png)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}; it must be at least 1")

    print("starting the processes: two ranks and a sampler for each run", flush=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        trainers, samplers = zip(*(processes.start(f"{folder}/{run}", running) for run in range(2)), strict=True)
        for trainer, sampler in zip(trainers, samplers, strict=True):  # the first calls are slow
            _, samples = sampler.call("sample", 0, 0)
            trainer.on_all("train_synchronously", [[advantages(samples)]])
            trainer.on_all("reset")
        streaming, on_policy = asyncio.run(train_both(trainers, samplers, options))
        trainer = trainers[1]
        weights, loss = trainer.weights(), trainer.loss(trainer.steps[0])
        trainer.on_all("train_synchronously", trainer.steps)
        expected, expected_loss = trainer.weights(), trainer.loss(trainer.steps[0])

    print()
    for run in (streaming, on_policy):
        print(run)
    speed_up, failure = judge(streaming, on_policy)
    title = "Streaming and on-policy training"
    if speed_up:
        title = f"Streaming is {speed_up:.2f} times as fast as on-policy training to a mean reward of {GOAL}"
        print(title)
    largest = max(float(abs(weights[name] - expected[name]).max()) for name in expected)
    print(f"loss of the first groups at the end: on-policy {loss:.6f}, synchronous {expected_loss:.6f}")
    print(f"largest difference of a parameter: {largest:.1e}")
    plot((streaming, on_policy), title, options.plot)
    if largest > 1e-6:
        failure = "on-policy and synchronous training of the same groups came to different parameters"
    if failure:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failure else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
