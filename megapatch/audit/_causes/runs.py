"""Causes of broken rules about ranks, modes, hooks, schedules, checkpoints and generation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .cause import Cause

RUNS: Mapping[str, tuple[Cause, ...]] = MappingProxyType(
    {
        "gathered-when-read": (
            Cause(
                "a checkpoint, an export or a weight sync right after a step, with overlap_param_gather",
                "the sentence names the reader; disable_forward_pre_hook() before it gathers",
                "reads",
            ),
            Cause(
                "code of your own that sends parameters one by one",
                "the line is that of the collective; disable_forward_pre_hook() before it gathers",
                "sends",
            ),
        ),
        "ranks-agree": (
            Cause(
                "a parameter without the attribute sequence_parallel, with sequence parallelism",
                "norms, biases or routers are named; not found without sequence parallelism",
                "tensor-parallel",
            ),
            Cause(
                "a missing all-reduce: gradients that were not reduced, or reduced at the wrong time",
                "found from the second step on; reduced-once is found in the step before",
            ),
            Cause(
                "a missing gather: a hook of overlap_param_gather that was taken off",
                "with overlap_param_gather only; a part of the parameters is named, and heals in the next step",
                "data-parallel",
            ),
            Cause(
                "another seed on each rank, as the model was made or for its dropout",
                "as it was made: at the first comparison, all matrices; dropout: not found with rates of 0",
            ),
            Cause(
                "a load that some ranks have missed, or a broadcast after it",
                "the timeline has a load just before, on some ranks only",
            ),
            Cause("a rank that changes parameters by itself", "none of the others; log their sum after each call"),
        ),
        "calls-alike": (
            Cause("samples are packed or filtered on each rank by itself", "the numbers vary from step to step"),
            Cause("a rank skips batches, as of too long samples", "the same rank always has the lower number"),
        ),
        "data-differs": (
            Cause(
                "the sampler is not given the rank", "num_replicas or rank of DistributedSampler are its defaults"
            ),
            Cause("it is given the rank of another group", "they are those of tensor or context parallelism"),
        ),
        "training-mode": (
            Cause("train() is not called after eval()", "found from the first evaluation on"),
            Cause("dropout is off on purpose", "found in every step; rates of 0 say that, too"),
        ),
        "evaluation-mode": (
            Cause("eval() is not called before log-probabilities", "found in every forward-only call"),
            Cause("they are meant to have dropout", "the trainer's documentation says so"),
        ),
        "hooks-balanced": (
            Cause("no_sync() is entered in itself", "no_sync() is named; no exception came before", "no_sync()"),
            Cause(
                "a call that raised, and was survived, has left them",
                "the timeline has an exception just before",
            ),
            Cause("a hook is replaced during a call, and not put back", "the hook is named", "config."),
        ),
        "stages-differ": (
            Cause(
                "the seed is the same on all stages, and not raised by 100 for each as Megatron does",
                "the line is that of the seeding",
            ),
        ),
        "expert-streams-differ": (
            Cause(
                "a checkpoint has the streams of the first expert rank for all (Megatron-LM#6858)",
                "the timeline has a load; seed expert ranks again after it",
            ),
            Cause("expert ranks are seeded alike", "found at the first comparison of the run"),
        ),
        "learning-rate-moves": (
            Cause(
                "the schedule advances whether or not a step was made",
                "the line is not below a condition on what optimizer.step() has returned",
            ),
        ),
        "schedule-once": (
            Cause("trainer and engine both advance it", "the line is not the only one that does"),
            Cause("it advances in each minibatch", "as often as there are minibatches, less one"),
        ),
        "saved-what-is": (
            Cause(
                "a filter of the state dict leaves parameters out",
                "those that are named have a name in common",
                "does not have",
            ),
            Cause(
                "a strategy keeps the plan of an earlier save",
                "not found without --ckpt-assume-constant-structure and --ckpt-fully-parallel-save",
                "a plan is kept",
            ),
        ),
        "weights-synced": (
            Cause("another model was loaded as weights were sent", "the model is named", "of the model"),
            Cause("some engines have missed a sync", "not all engines are named", "engines have"),
            Cause("an older version was sent", "the digest is that of an earlier sync", "instead of"),
            Cause(
                "names or types are changed on one side before the digest is taken",
                "found in the first sync, and in all others",
            ),
        ),
        "resumed": (
            Cause(
                "no `finally` resumes generation after an exception in the sync",
                "the line is in the sync; the log has its exception",
                "still paused",
            ),
            Cause("an engine does not answer", "the sentence has the exception of the request", "has failed"),
        ),
    }
)
"""By rule."""
