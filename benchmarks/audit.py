"""What the audit adds to a step, relative to the same step without it.

    python benchmarks/audit.py [--rounds 6]

Two ranks on CPU. Three kinds of step take turns in the same processes: without the audit, with it, and with it and
a comparison of the ranks. Two models of one size do each kind, and make way for new ones after some rounds, as
equal models already differ by some percent: the median over all of them counts. Prints by how much a step takes
longer with a comparison in 50 steps, and with one in every step, and exits with 1 if it is more than is promised.
Needs megapatch, torch and megatron-core.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import time

import torch
from train_step import MICRO_BATCH_SIZE, SIZE

from megapatch import audit
from megapatch.testing import init_parallel, run_ranks, tiny_gpt

MOST = {50: 0.01, 1: 0.05}  # of a step, by how many steps lie between two comparisons
NEVER = 10**9
GENERATIONS = 8  # of models: where they lie in memory makes some percent of difference
OFF, WATCHED, COMPARED = "without the audit", "watched", "compared"


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def measure(rank, world_size, rounds, port):
    """Return, for each generation of models, the seconds of each step by kind, and the number of findings."""
    # Ranks meet in torch.distributed's store: a server, as torchrun has it. That of run_ranks is a file, where a
    # wait takes ten milliseconds.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    init_parallel()
    options = {"lr": 1e-3, "overlap_grad_reduce": True, "ddp": {"bucket_size": 200_000}, **SIZE}
    return [measure_models(options, rounds) for _ in range(GENERATIONS)]


def measure_models(options, rounds):
    """Return by kind the seconds of each step of four new models, and the number of findings."""
    models = {True: [], False: []}
    for audited in (False, True, True, False):  # a model keeps the hooks that it was wrapped with
        (audit.start if audited else audit.stop)()
        models[audited].append(tiny_gpt(**options))
    batches = models[True][0].microbatches(0, 1, micro_batch_size=MICRO_BATCH_SIZE)
    found = {kind: [] for kind in (OFF, WATCHED, COMPARED)}

    def step(model, kind):
        torch.distributed.barrier()
        start = time.perf_counter()
        model.train_step(microbatches=batches)
        torch.distributed.barrier()
        found[kind].append(time.perf_counter() - start)

    for _ in range(rounds + 2):
        audit.stop()
        for model in models[False]:
            step(model, OFF)
        for model in models[True]:
            audit.start(every=NEVER)
            step(model, WATCHED)
            audit.start(every=1)
            step(model, COMPARED)
    return {kind: seconds[4:] for kind, seconds in found.items()}, len(audit.findings())  # without the first ones


def added_by(seconds):
    """Return by what part of a step watching makes it longer, and by what part a comparison does."""
    off, watched = (statistics.median(seconds[kind]) for kind in (OFF, WATCHED))
    # The same model makes both steps, one after the other.
    pairs = zip(seconds[WATCHED], seconds[COMPARED], strict=True)
    return watched / off - 1, statistics.median(compared - before for before, compared in pairs) / off


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6, help="steps of each kind, by each model")
    options = parser.parse_args()
    measured = run_ranks(measure, 2, options.rounds, free_port(), timeout=3600)[0]
    off = statistics.median(second for seconds, _ in measured for second in seconds[OFF])
    print(f"a step without the audit: {off * 1e3:.1f} ms")
    parts = zip(*(added_by(seconds) for seconds, _ in measured), strict=True)
    watching, comparison = (statistics.median(part) for part in parts)
    too_much = any(findings for _, findings in measured)
    for every, most in MOST.items():
        added = watching + comparison / every
        too_much |= added > most
        print(f"ranks compared every {every:>2} steps: {added:+.2%} (at most {most:.0%})")
    return int(too_much)


if __name__ == "__main__":
    sys.exit(main())
