"""How much of the reduce of gradients a step leaves exposed, on a network that takes time.

    python benchmarks/overlap.py [--pieces 8] [--rounds 8] [--network 0.5] [--plot FILE]

Two ranks on CPU, with the same microbatches and overlap_grad_reduce. Three kinds of step take turns in the same
processes: Megatron's own step of one call, a step split over several calls, and one that is told which call is
the last. A stand-in for the network holds each bucket group's reduce back for a time by its bytes, one after the
other, and uses no processor. Prints the throughput relative to one call, and exits with 1 if it is below what is
promised. Needs megapatch, torch and megatron-core; for --plot matplotlib.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from unittest import mock

import torch
from train_step import MICRO_BATCH_SIZE, SIZE, seconds

from megapatch.testing import init_parallel, run_ranks, tiny_gpt
from megapatch.testing._data import forward_step
from megapatch.train_step import TrainStep

LEAST = 0.98  # of the throughput of one call, where the last call is known
WARM_UP = 3  # steps of each kind: Megatron learns in its first one when gradients are ready
KINDS = ("one call", "split", "split, last call known")


class Network:
    """One link: a reduce that is waited for takes until all before it, and its own bytes, have passed.

    seconds  for the gradients of the whole model; 0 to measure without a network
    """

    def __init__(self, chunk, seconds):
        self.groups = chunk.bucket_groups
        total = sum(bucket.grad_data.nbytes for group in self.groups for bucket in group.buckets)
        self.seconds_per_byte = seconds / total
        self.free_at = 0.0

    @contextlib.contextmanager
    def connected(self):
        kind = type(self.groups[0])
        start = kind.start_grad_sync

        def start_grad_sync(group, *args, **kwargs):
            before = group.grad_reduce_handle
            start(group, *args, **kwargs)
            if group.grad_reduce_handle is not before:
                group.grad_reduce_handle = self.passing(group, group.grad_reduce_handle)

        with mock.patch.object(kind, "start_grad_sync", start_grad_sync):
            yield

    def passing(self, group, handle):
        size = sum(bucket.grad_data.nbytes for bucket in group.buckets)
        self.free_at = max(self.free_at, time.perf_counter()) + size * self.seconds_per_byte
        return Passing(handle, self.free_at)


class Passing:
    """The handle of a reduce that is on its way until a moment."""

    def __init__(self, handle, until):
        self.handle, self.until = handle, until

    def wait(self):
        self.handle.wait()
        time.sleep(max(0.0, self.until - time.perf_counter()))


def measure(rank, world_size, pieces, rounds, network):
    """Return by kind the seconds of each round; and the seconds of the stand-in network.

    network  its time for all gradients, in steps of one microbatch without any network
    """
    init_parallel()
    options = {"lr": 1e-3, "overlap_grad_reduce": True, "ddp": {"bucket_size": 200_000}, **SIZE}
    model = tiny_gpt(**options)
    step = TrainStep(model.chunks, model.optimizer)
    batches = model.microbatches(0, pieces, micro_batch_size=MICRO_BATCH_SIZE)

    def one_call():
        model.train_step(microbatches=batches)

    def split(last):
        with step:
            for index, batch in enumerate(batches):
                step.forward_backward(
                    forward_step_func=forward_step,
                    data_iterator=iter([batch]),
                    num_microbatches=1,
                    last=last and index == pieces - 1,
                    seq_length=model.seq,
                    micro_batch_size=MICRO_BATCH_SIZE,
                )
            step.finish()

    takes = dict(zip(KINDS, (one_call, lambda: split(False), lambda: split(True)), strict=True))
    for take in takes.values():
        for _ in range(WARM_UP):
            take()
    single = agreed(statistics.median(seconds(one_call) for _ in range(3)) / pieces)
    with Network(model.chunks[0], network * single).connected():
        found = {kind: [] for kind in KINDS}
        for round_ in range(rounds):
            order = [*KINDS[round_ % 3 :], *KINDS[: round_ % 3]]
            for kind in order:
                found[kind].append(seconds(takes[kind]))
    return found, network * single


def agreed(value):
    """Return rank 0's value."""
    found = torch.tensor([value], dtype=torch.float64)
    torch.distributed.broadcast(found, 0)
    return float(found)


def plot(file, throughputs, title):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 2.2), layout="constrained")
    names = list(throughputs)[::-1]
    bars = axes.barh(names, [throughputs[name] for name in names], color=["#4c78a8", "#f58518", "#bab0ac"])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.set_xlim(0, 1.15)
    axes.set_xlabel("throughput, relative to one call")
    axes.set_title(title, fontsize=10)
    figure.savefig(file, metadata={"Date": None})


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pieces", type=int, default=8, help="microbatches, each a call of its own (default: 8)")
    parser.add_argument("--rounds", type=int, default=9, help="how often each kind is measured (default: 9)")
    parser.add_argument(
        "--network",
        type=float,
        default=0.5,
        help="the network's time for all gradients, in microbatches' forward and backward passes (default: 0.5)",
    )
    parser.add_argument("--plot", metavar="FILE", help="write the result as a picture")
    arguments = parser.parse_args()
    measured = (arguments.pieces, arguments.rounds, arguments.network)
    found, network = run_ranks(measure, 2, *measured, timeout=600.0)[0]
    medians = {kind: statistics.median(times) for kind, times in found.items()}
    throughputs = {kind: medians["one call"] / median for kind, median in medians.items()}
    title = f"{arguments.pieces} microbatches, 2 ranks, a network that takes {network * 1e3:.0f} ms"
    print(title)
    for kind, median in medians.items():
        print(f"  {kind}: {median * 1e3:.0f} ms, {throughputs[kind]:.3f} of the throughput of one call")
    kept = throughputs[KINDS[-1]] >= LEAST
    print(f"  {KINDS[-1]}: at least {LEAST}: {'kept' if kept else 'BROKEN'}")
    if arguments.plot:
        plot(arguments.plot, throughputs, title)
    return kept


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
