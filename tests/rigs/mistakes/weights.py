"""Mistakes with weights and moments that are swapped and offloaded."""

from __future__ import annotations

import contextlib

import torch

from rigs.megatron.options import ADAM, Interrupted
from rigs.mistakes import Table

BF16 = {"dtype": "bf16"}
SHARDED = {**BF16, **ADAM, "use_distributed_optimizer": True}

FP32 = {**ADAM, "use_distributed_optimizer": True}

SWAPS = Table("swaps and offloads of weights")


def swap(name, in_fp32=True):
    """Add a mistake in bf16, and in fp32, where weights have no main parameters; each sharded, too."""
    variants = [("main-params-agree", "", BF16), ("main-params-agree", ", sharded", SHARDED)]
    if in_fp32:
        variants += [("kept-between-steps", ", in fp32", {}), ("kept-between-steps", ", in fp32, sharded", FP32)]

    def add(take_step):
        for rule, suffix, options in variants:
            SWAPS.row(f"{name}{suffix}", {rule: 2}, **options)(take_step)
        return take_step

    return add


def parameters_of(model):
    return [parameter for chunk in model.chunks for parameter in chunk.parameters()]


def log_probabilities(model, step):
    with torch.no_grad():
        model.forward_backward(step, forward_only=True)


def copies_of(model):
    return [parameter.detach().clone() for parameter in parameters_of(model)]


def put(model, weights):
    for parameter, weight in zip(parameters_of(model), weights, strict=True):
        parameter.data.copy_(weight)


@contextlib.contextmanager
def reference_in(model):
    """Swap in a reference: half of the weights; the caller swaps them out."""
    policy = copies_of(model)
    put(model, [weight * 0.5 for weight in policy])
    yield policy


@swap("the reference stays in the model")
def reference_left_in(model, step):
    if step == 1:
        with reference_in(model):
            log_probabilities(model, step)
    model.train_step(step)


@swap("the policy is swapped in by halves")
def half_swapped_out(model, step):
    with reference_in(model) as policy:
        log_probabilities(model, step)
    reference = copies_of(model)
    half = len(policy) // 2
    put(model, [*policy[:half], *reference[half:]] if step == 1 else policy)
    model.train_step(step)


@swap("the policy that is swapped in is one step old")
def swapped_for_older_weights(model, step):
    """The copy of the policy is that of the step before."""
    older = getattr(model, "kept", None)
    model.kept = copies_of(model)
    with reference_in(model) as policy:
        log_probabilities(model, step)
    put(model, older if step == 1 else policy)
    model.train_step(step)


@swap("an exception leaves the reference in the model")
def left_in_by_an_exception(model, step):
    with contextlib.suppress(Interrupted), reference_in(model) as policy:
        if step == 1:
            raise Interrupted
        put(model, policy)
    model.train_step(step)


@swap("an average of the weights is written into the model", in_fp32=False)
def average_written_into_the_model(model, step):
    average = getattr(model, "average", None) or copies_of(model)
    if step == 1:
        put(model, average)
    model.average = [0.5 * (mean + now) for mean, now in zip(average, copies_of(model), strict=True)]
    if step == 1:
        log_probabilities(model, step)
    model.train_step(step)


@SWAPS.row("swapped on one rank only", {"main-params-agree": 2, "ranks-agree": 2}, **BF16)
def swapped_on_one_rank(model, step):
    if step == 1:
        log_probabilities(model, step)
        if torch.distributed.get_rank() == 1:
            put(model, [weight * 0.5 for weight in copies_of(model)])
    model.train_step(step)


@swap("an adapter stays merged after an export")
def adapter_merged_for_good(model, step):
    """Weights that are merged for an export are not unmerged."""
    if step == 1:
        next(iter(model.chunks[0].parameters())).data.add_(0.25)
        log_probabilities(model, step)
    model.train_step(step)


@SWAPS.row("weights come back in other memory, in fp32, sharded", {"kept-between-steps": 1}, **FP32)
def other_memory(model, step):
    """An offload that assigns `parameter.data`: the buffer is stepped, and the model stays as it was (verl#64)."""
    for parameter in parameters_of(model) if step == 1 else ():
        parameter.data = parameter.data.clone()
    model.train_step(step)


def parts_of(optimizer):
    return getattr(optimizer, "chained_optimizers", [optimizer])


@SWAPS.row("main parameters are onloaded from an older copy", {"main-params-agree": 3}, **BF16)
@SWAPS.row("main parameters are onloaded from an older copy, sharded", {"main-params-agree": 3}, **SHARDED)
def stale_main_parameters(model, step):
    """The optimizer is onloaded from a copy of the step before."""
    mains = [
        main.data
        for part in parts_of(model.optimizer)
        for name in ("fp32_from_float16_groups", "shard_fp32_from_float16_groups")
        for group in getattr(part, name, ())
        for main in group
    ]
    if step == 2:
        for main, older in zip(mains, model.older, strict=True):
            main.copy_(older)
    model.older = [main.clone() for main in mains]
    model.train_step(step)


def moments_of(model):
    return [
        state[name]
        for part in parts_of(model.optimizer)
        for state in part.optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq")
    ]


@SWAPS.row("moments are lost in an offload", {"kept-between-steps": 2}, **ADAM)
@SWAPS.row("moments are lost in an offload, sharded", {"kept-between-steps": 2}, **SHARDED)
def moments_lost(model, step):
    """They are zero after an onload."""
    for moment in moments_of(model) if step == 1 else ():
        moment.data.zero_()
    model.train_step(step)


@SWAPS.row("moments are onloaded from an older copy", {"kept-between-steps": 3}, **SHARDED)
def stale_moments(model, step):
    """They are onloaded from a copy of the step before."""
    for moment, older in zip(moments_of(model), model.older, strict=True) if step == 2 else ():
        moment.copy_(older)
    model.older = [moment.clone() for moment in moments_of(model)]
    model.train_step(step)


@SWAPS.row(
    "the moments of one parameter are lost", {}, why="some parameters of each optimizer are looked at", **ADAM
)
def one_moment_lost(model, step):
    if step == 1:
        moments_of(model)[2].zero_()
    model.train_step(step)
