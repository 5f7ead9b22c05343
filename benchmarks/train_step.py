"""The cost of a step split over several calls, relative to Megatron's own step of one call.

    python benchmarks/train_step.py [--calls 8] [--rounds 8]

Two ranks on CPU, with the same microbatches, with and without overlap_grad_reduce; both kinds of step take turns
in the same processes. Prints the relative throughput, and exits with 1 if it is below what is promised. Needs
megapatch, torch and megatron-core.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from megapatch.testing import init_parallel, run_ranks, tiny_gpt
from megapatch.testing._data import forward_step
from megapatch.train_step import TrainStep

LEAST = 0.98  # of the throughput of one call
SIZE = {"layers": 4, "hidden": 256, "heads": 4, "vocab": 512, "seq": 128}
MICRO_BATCH_SIZE = 4


def measure(rank, world_size, calls, rounds, overlap):
    """Return the seconds of each round: (one call, split)."""
    init_parallel()
    model = tiny_gpt(lr=1e-3, overlap_grad_reduce=overlap, ddp={"bucket_size": 200_000}, **SIZE)
    step = TrainStep(model.chunks, model.optimizer)
    batches = model.microbatches(0, calls, micro_batch_size=MICRO_BATCH_SIZE)

    def at_once():
        model.train_step(microbatches=batches)

    def split():
        with step:
            for batch in batches:
                step.forward_backward(
                    forward_step_func=forward_step,
                    data_iterator=iter([batch]),
                    num_microbatches=1,
                    seq_length=model.seq,
                    micro_batch_size=MICRO_BATCH_SIZE,
                )
            step.finish()

    found = []
    for round_ in range(rounds + 1):
        kinds = (at_once, split) if round_ % 2 else (split, at_once)
        taken = {kind: seconds(kind) for kind in kinds}
        found.append((taken[at_once], taken[split]))
    return found[1:]  # the first round also starts what is started only once


def seconds(function):
    torch.distributed.barrier()
    start = time.perf_counter()
    function()
    torch.distributed.barrier()
    return time.perf_counter() - start


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=8, help="microbatches, each a call of its own (default: 8)")
    parser.add_argument("--rounds", type=int, default=8, help="how often each kind is measured (default: 8)")
    arguments = parser.parse_args()
    print(f"{arguments.calls} microbatches in one call, and in a call each; 2 ranks")
    kept = True
    for overlap in (False, True):
        rounds = run_ranks(measure, 2, arguments.calls, arguments.rounds, overlap, timeout=600.0)[0]
        one_call, split = (statistics.median(times) for times in zip(*rounds, strict=True))
        throughput = one_call / split
        kept = kept and throughput >= LEAST
        print(
            f"  {'with' if overlap else 'without'} overlap_grad_reduce: one call {one_call * 1e3:.0f} ms, split ",
            end="",
        )
        print(f"{split * 1e3:.0f} ms: {throughput:.3f} of its throughput; at least {LEAST}", end="")
        print(f": {'kept' if throughput >= LEAST else 'BROKEN'}")
    return kept


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
