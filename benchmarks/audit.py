"""The audit's cost in a step, relative to the same step without it.

    python benchmarks/audit.py [--rounds 6]

Two ranks on CPU. Three kinds of step take turns in the same processes and on the same model: without the audit,
with it, and with it and a comparison of the ranks. Equal models differ by some percent, so that each step is held
against those of its own model, and new models take their place: the median over all of them counts. A model keeps
the hooks that it was wrapped with, which count nothing without the audit: what they add is measured by itself.
Prints by how much a step takes longer with a comparison in 50 steps, and with one in every step, and what is added
to the hook that puts a parameter's gradient into its bucket. For a
model of 20,000 small parameters in 2,000 buckets, of whose step hooks are a large part, what the audit does in a
step is added up. Exits with 1 if anything is more than is promised. Needs megapatch, torch and megatron-core.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
import time
import timeit

import torch
from train_step import MICRO_BATCH_SIZE, SIZE, seconds

from megapatch import audit
from megapatch.audit._gradients import Gradients, watch_reduces
from megapatch.testing import init_parallel, run_ranks, tiny_gpt

MOST = {50: 0.01, 1: 0.05}  # of a step, by how many steps lie between two comparisons
MOST_OF_HOOK = 300  # nanoseconds
PARAMETERS, BUCKETS = 20_000, 2_000
MOST_OF_MANY = 0.01  # of a step
ROUNDS_OF_MANY = 10
NEVER = 10**9
GENERATIONS = 4  # of models: where they lie in memory makes some difference
WARM_UP = 2  # rounds that do not count
STEPS = 2  # of each kind, in a round
EARLY = 64  # steps: in the first ones ranks are compared more often
OFF, WATCHED, COMPARED = "without the audit", "watched", "compared"


def measure(rank, world_size, rounds):
    """Return, for each generation of models, the seconds of each step by kind; and the number of findings."""
    init_parallel()
    measured = [measure_model(rounds) for _ in range(GENERATIONS)]
    findings = sum(findings for _, findings in measured)
    return [times for times, _ in measured], findings, added_to_hook()


def measure_model(rounds):
    """Return by kind the seconds of each step of a new model, and the number of findings."""
    audit.start()
    model = tiny_gpt(lr=1e-3, overlap_grad_reduce=True, ddp={"bucket_size": 200_000}, **SIZE)
    batches = model.microbatches(0, 1, micro_batch_size=MICRO_BATCH_SIZE)
    step = functools.partial(model.train_step, microbatches=batches)
    times = {kind: [] for kind in (OFF, WATCHED, COMPARED)}
    findings = 0
    for _ in range(rounds + WARM_UP):
        audit.stop()
        for kind, begin in (
            (OFF, lambda: None),
            (WATCHED, functools.partial(start_late, NEVER)),
            (COMPARED, functools.partial(audit.start, every=1)),
        ):
            begin()
            step()  # ranks settle, or leave a comparison to the next step to read
            times[kind] += [seconds(step) for _ in range(STEPS)]
        findings += len(audit.findings())
    return {kind: taken[WARM_UP * STEPS :] for kind, taken in times.items()}, findings


def start_late(every):
    """Start the audit as in a run that has made its first steps."""
    audit.start(every=every)
    audit._PROCESS.audit.ledger.step = EARLY


def added_to_hook():
    """Return the nanoseconds that the audit adds to a hook of a real model, here one that does nothing itself."""
    audit.start()
    (chunk,) = tiny_gpt().chunks
    hook = {False: lambda *unused: None}
    make = part_of(Gradients).watch_arrivals(lambda ddp, parameter: hook[False])
    hook[True] = make(chunk, next(chunk.module.parameters()))
    nanoseconds = {is_audited: nanoseconds_of(functools.partial(hook[is_audited], None)) for is_audited in hook}
    audit.stop()
    return nanoseconds[True] - nanoseconds[False]


def added_to_reduce(group):
    """Return the nanoseconds that the audit adds to a call that begins a bucket group's reduce."""
    watched = watch_reduces(lambda group: None)
    return nanoseconds_of(lambda: watched(group)) - nanoseconds_of(lambda: (lambda group: None)(group))


def nanoseconds_of(function):
    return min(timeit.repeat(function, number=100_000, repeat=50)) * 1e4


def part_of(kind):
    return audit._PROCESS.audit.part(kind)


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
    """Return by what part of a step the audit makes it longer for a model of `Many` small parameters.

    That is less than by what equal steps of this model differ, even in the time of one thread. So all that the
    audit does is added up: its looks at a step, its part of each hook, and its part of each reduce.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    init_parallel()
    of_hook = added_to_hook()
    spent = time_looks()
    config = tiny_gpt(hooks=False).config
    buckets = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=PARAMETERS // BUCKETS)
    start_late(NEVER)
    chunk = DistributedDataParallel(config, buckets, Many(config))
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.0), [chunk])
    step = functools.partial(step_of_many, chunk, optimizer)
    step()  # it looks closely
    of_looks = []
    for _ in range(ROUNDS_OF_MANY):
        spent.clear()
        thread_seconds(step)
        of_looks.append(sum(spent))
    of_reduce = added_to_reduce(chunk.bucket_groups[0])
    audit.stop()
    off = statistics.median(thread_seconds(step) for _ in range(ROUNDS_OF_MANY))
    return (statistics.median(of_looks) + (of_hook * PARAMETERS + of_reduce * BUCKETS) / 1e9) / off


def time_looks():
    """Have each look of the audit from now on add its time on this thread to a list. Return the list."""
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
            start = time.thread_time()
            try:
                return look(*args, **kwargs)
            finally:
                spent.append(time.thread_time() - start)
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


def added_by(times):
    """Return by what part of a step watching makes it longer, and by what part a comparison does."""
    off, watched, compared = (statistics.median(times[kind]) for kind in (OFF, WATCHED, COMPARED))
    return watched / off - 1, (compared - watched) / off


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6, help="steps of each kind, by each model")
    options = parser.parse_args()
    measured, findings, of_hook = run_ranks(measure, 2, options.rounds, timeout=3600)[0]
    (of_many,) = run_ranks(many_small, 1, timeout=3600)
    off = statistics.median(second for times in measured for second in times[OFF])
    print(f"a step without the audit: {off * 1e3:.1f} ms")
    watching, comparison = map(statistics.median, zip(*map(added_by, measured), strict=True))
    too_much = findings > 0
    for every, most in MOST.items():
        added = watching + comparison / every
        too_much |= added > most
        print(f"ranks compared every {every:>2} steps: {added:+.2%} (at most {most:.0%})")
    print(f"a gradient's hook: {of_hook:+.0f} ns (at most {MOST_OF_HOOK})")
    print(f"a step of {PARAMETERS:,} parameters, {BUCKETS:,} buckets: {of_many:+.2%} (at most {MOST_OF_MANY:.0%})")
    return int(too_much or of_hook > MOST_OF_HOOK or of_many > MOST_OF_MANY)


if __name__ == "__main__":
    sys.exit(main())
