"""The audit's cost in a step, relative to the same step without it.

    python benchmarks/audit.py [--steps 40]

Two ranks on CPU. Equal steps differ by more than the audit adds to one, so that all that it does in a step is
added up: its looks, with their waits for other ranks, and its parts of each hook and of each bucket's reduce.
Prints by how much a step takes longer with a comparison of the ranks in 50 steps, and with one in every step,
what is added to the hook that puts a parameter's gradient into its bucket, and by how much a step of 20,000
small parameters in 2,000 buckets takes longer, of which hooks are a large part. Exits with 1 if anything is more
than is promised. Needs megapatch, torch and megatron-core.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
import time
import timeit
from typing import NamedTuple

import torch
from train_step import MICRO_BATCH_SIZE, SIZE, seconds

from megapatch import audit
from megapatch.audit._gradients import Gradients, watch_reduces
from megapatch.testing import init_parallel, run_ranks, tiny_gpt

MOST = {50: 0.01, 1: 0.05}  # of a step, by how many steps lie between two comparisons
MOST_OF_HOOK = 300  # nanoseconds
PARAMETERS, BUCKETS = 20_000, 2_000
MOST_OF_MANY = 0.01  # of a step
STEPS_OF_MANY = 10
NEVER = 10**9
EARLY = 64  # steps: in the first ones ranks are compared more often


class Added(NamedTuple):
    """Seconds that the audit adds to a step, without and with a comparison of the ranks, and those of the step."""

    watching: float
    comparing: float
    step: float


def measure(rank, world_size, steps):
    """Return what is `Added` to a step, and the nanoseconds that are added to a hook."""
    init_parallel()
    of_hook = added_to_hook()
    spent = time_looks(time.perf_counter)
    start_late(NEVER)
    model = tiny_gpt(lr=1e-3, overlap_grad_reduce=True, ddp={"bucket_size": 200_000}, **SIZE)
    batches = model.microbatches(0, 1, micro_batch_size=MICRO_BATCH_SIZE)
    step = functools.partial(model.train_step, microbatches=batches)
    watching = looks_in(step, spent, steps)
    audit.start(every=1)
    comparing = looks_in(step, spent, steps)
    of_hooks = hooks_and_reduces(model.chunks[0], of_hook)
    assert not audit.findings()
    audit.stop()
    off = statistics.median(seconds(step) for _ in range(steps))
    return Added(watching + of_hooks, comparing + of_hooks, off), of_hook


def looks_in(step, spent, steps):
    """Return the seconds that the audit's looks take in a step, the first two left aside."""
    totals = []
    for _ in range(steps + 2):  # ranks settle, and leave a comparison to the next step to read
        spent.clear()
        step()
        totals.append(sum(spent))
    return statistics.median(totals[2:])


def hooks_and_reduces(chunk, of_hook):
    """Return the seconds that are added to the hooks and reduces of a step."""
    parameters = sum(1 for _ in chunk.module.parameters())
    watched = watch_reduces(lambda group: None)
    of_reduce = nanoseconds_of(functools.partial(watched, chunk.bucket_groups[0])) - nanoseconds_of(lambda: None)
    return (parameters * of_hook + len(chunk.bucket_groups) * of_reduce) / 1e9


def start_late(every):
    """Start the audit as in a run that has made its first steps."""
    audit.start(every=every)
    audit._PROCESS.audit.ledger.step = EARLY


def added_to_hook():
    """Return the nanoseconds that the audit adds to a hook of a real model, here one that does nothing itself."""
    audit.start()
    (chunk,) = tiny_gpt().chunks
    hook = {False: lambda *unused: None}
    make = audit._PROCESS.audit.part(Gradients).watch_arrivals(lambda ddp, parameter: hook[False])
    hook[True] = make(chunk, next(chunk.module.parameters()))
    nanoseconds = {is_audited: nanoseconds_of(functools.partial(hook[is_audited], None)) for is_audited in hook}
    audit.stop()
    return nanoseconds[True] - nanoseconds[False]


def nanoseconds_of(function):
    return min(timeit.repeat(function, number=100_000, repeat=50)) * 1e4


class Many(torch.nn.Module):
    """A product of small parameters."""

    def __init__(self, config):
        from megatron.core.enums import ModelType

        super().__init__()
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.factors = torch.nn.ParameterList(torch.ones(1) for _ in range(PARAMETERS))

    def forward(self, value):
        for factor in self.factors:
            value = value * factor
        return value

    def set_input_tensor(self, tensor):
        """Megatron's schedule calls it; there is no stage before this one."""


def many_small(rank, world_size):
    """Return by what part of a step the audit makes it longer for a model of `Many` small parameters."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    init_parallel()
    of_hook = added_to_hook()
    spent = time_looks(time.thread_time)
    config = tiny_gpt(hooks=False).config
    buckets = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=PARAMETERS // BUCKETS)
    start_late(NEVER)
    chunk = DistributedDataParallel(config, buckets, Many(config))
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.0), [chunk])
    step = functools.partial(step_of_many, chunk, optimizer)
    of_looks = looks_in(functools.partial(thread_seconds, step), spent, STEPS_OF_MANY)
    of_hooks = hooks_and_reduces(chunk, of_hook)
    audit.stop()
    return (of_looks + of_hooks) / statistics.median(thread_seconds(step) for _ in range(STEPS_OF_MANY))


def time_looks(clock):
    """Have each look of the audit from now on add its seconds to a list. Return the list."""
    audit.start()
    kinds = {type(part) for part in audit._PROCESS.audit.parts}
    audit.stop()
    spent, inside = [], []

    def timed(look):
        @functools.wraps(look)
        def timed_look(*args, **kwargs):
            if inside:  # a look that another one makes
                return look(*args, **kwargs)
            inside.append(look)
            start = clock()
            try:
                return look(*args, **kwargs)
            finally:
                spent.append(clock() - start)
                inside.clear()

        return timed_look

    for kind in kinds:
        for name, look in list(vars(kind).items()):
            if getattr(getattr(look, "__code__", None), "co_name", "") == "guarded":  # as all looks are
                setattr(kind, name, timed(look))
    return spent


def thread_seconds(function):
    """Return the time of this thread, without the garbage collector, which takes a tenth of some steps."""
    gc.collect()
    gc.disable()
    start = time.thread_time()
    function()
    taken = time.thread_time() - start
    gc.enable()
    return taken


def step_of_many(chunk, optimizer):
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunk.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=lambda data, model: (model(torch.ones(1)), lambda output: (output.sum(), {})),
        data_iterator=None,
        model=[chunk],
        num_microbatches=1,
        seq_length=1,
        micro_batch_size=1,
    )
    chunk.finish_grad_sync()
    optimizer.step()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="steps of each kind")
    options = parser.parse_args()
    added, of_hook = run_ranks(measure, 2, options.steps, timeout=3600)[0]
    (of_many,) = run_ranks(many_small, 1, timeout=3600)
    print(f"a step without the audit: {added.step * 1e3:.1f} ms")
    too_much = False
    for every, most in MOST.items():
        part = (added.watching + (added.comparing - added.watching) / every) / added.step
        too_much |= part > most
        print(f"ranks compared every {every:>2} steps: {part:+.2%} (at most {most:.0%})")
    print(f"a gradient's hook: {of_hook:+.0f} ns (at most {MOST_OF_HOOK})")
    print(f"a step of {PARAMETERS:,} parameters, {BUCKETS:,} buckets: {of_many:+.2%} (at most {MOST_OF_MANY:.0%})")
    return int(too_much or of_hook > MOST_OF_HOOK or of_many > MOST_OF_MANY)


if __name__ == "__main__":
    sys.exit(main())
