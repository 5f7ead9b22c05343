"""Mistakes with weights that are swapped, offloaded, loaded, saved and exported."""

from __future__ import annotations

import contextlib

import torch

from rigs.megatron.options import ADAM, BOTH, Interrupted
from rigs.mistakes import Table

BF16 = {"dtype": "bf16"}
SHARDED = {**BF16, **ADAM, "use_distributed_optimizer": True}

NOT_WATCHED = "the state of optimizers is not watched"

SWAPS = Table("swaps and offloads of weights")
LOADS = Table("loads, saves and exports")


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


def reference_left_in(model, step):
    if step == 1:
        with reference_in(model):
            log_probabilities(model, step)
    model.train_step(step)


def half_swapped_out(model, step):
    with reference_in(model) as policy:
        log_probabilities(model, step)
    reference = copies_of(model)
    half = len(policy) // 2
    put(model, [*policy[:half], *reference[half:]] if step == 1 else policy)
    model.train_step(step)


def swapped_for_older_weights(model, step):
    """The copy of the policy is that of the step before."""
    older = getattr(model, "kept", None)
    model.kept = copies_of(model)
    with reference_in(model) as policy:
        log_probabilities(model, step)
    put(model, older if step == 1 else policy)
    model.train_step(step)


def left_in_by_an_exception(model, step):
    with contextlib.suppress(Interrupted), reference_in(model) as policy:
        if step == 1:
            raise Interrupted
        put(model, policy)
    model.train_step(step)


def average_written_into_the_model(model, step):
    average = getattr(model, "average", None) or copies_of(model)
    if step == 1:
        put(model, average)
    model.average = [0.5 * (mean + now) for mean, now in zip(average, copies_of(model), strict=True)]
    if step == 1:
        log_probabilities(model, step)
    model.train_step(step)


def swapped_on_one_rank(model, step):
    if step == 1:
        log_probabilities(model, step)
        if torch.distributed.get_rank() == 1:
            put(model, [weight * 0.5 for weight in copies_of(model)])
    model.train_step(step)


def adapter_merged_for_good(model, step):
    """Weights that are merged for an export are not unmerged."""
    if step == 1:
        next(iter(model.chunks[0].parameters())).data.add_(0.25)
        log_probabilities(model, step)
    model.train_step(step)


for name, take_step in {
    "the reference stays in the model": reference_left_in,
    "the policy is swapped in by halves": half_swapped_out,
    "the policy that is swapped in is one step old": swapped_for_older_weights,
    "an exception leaves the reference in the model": left_in_by_an_exception,
    "an average of the weights is written into the model": average_written_into_the_model,
    "an adapter stays merged after an export": adapter_merged_for_good,
}.items():
    SWAPS.row(name, take_step, {"main-params-agree": 2}, **BF16)
    SWAPS.row(f"{name}, sharded", take_step, {"main-params-agree": 2}, **SHARDED)
SWAPS.row("swapped on one rank only", swapped_on_one_rank, {"main-params-agree": 2, "ranks-agree": 2}, **BF16)
SWAPS.row(
    "the reference stays in the model, in fp32",
    reference_left_in,
    {},
    why="in fp32 model and optimizer have one copy of the weights",
)


def stale_main_parameters(model, step):
    """The optimizer is onloaded from a copy of the step before."""
    mains = [
        main.data
        for part in getattr(model.optimizer, "chained_optimizers", [model.optimizer])
        for name in ("fp32_from_float16_groups", "shard_fp32_from_float16_groups")
        for group in getattr(part, name, ())
        for main in group
    ]
    if step == 2:
        for main, older in zip(mains, model.older, strict=True):
            main.copy_(older)
    model.older = [main.clone() for main in mains]
    model.train_step(step)


def moments_lost(model, step):
    """The optimizer's moments are zero after an onload."""
    for part in getattr(model.optimizer, "chained_optimizers", [model.optimizer]) if step == 1 else ():
        for state in part.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].zero_()
    model.train_step(step)


SWAPS.row(
    "main parameters are onloaded from an older copy", stale_main_parameters, {"main-params-agree": 3}, **BF16
)
SWAPS.row(
    "main parameters are onloaded from an older copy, sharded",
    stale_main_parameters,
    {"main-params-agree": 3},
    **SHARDED,
)
SWAPS.row("moments are lost in an offload", moments_lost, {}, why=NOT_WATCHED, **SHARDED)


# ------------------------------------------------------------------------ loads
def loaded_without_the_optimizer(model, step):
    """A load of weights alone (SkyRL, verl, AReaL), in the last step."""
    if step == 2:
        model.chunks[0].load_state_dict(model.saved)
    model.saved = {
        name: tensor.clone() if isinstance(tensor, torch.Tensor) else tensor
        for name, tensor in model.chunks[0].state_dict().items()
    }
    model.train_step(step)


def loaded_on_one_rank(model, step):
    """A rank that missed a broadcast."""
    model.train_step(step)
    if step == 0 and torch.distributed.get_rank() == 1:
        for name, parameter in model.chunks[0].module.named_parameters():
            if name.endswith("final_layernorm.weight"):
                parameter.data[3] += 1e-3


LOADS.row(
    "weights are loaded without the optimizer", loaded_without_the_optimizer, {"main-params-agree": 3}, **BF16
)
LOADS.row("weights are loaded on one rank only", loaded_on_one_rank, {"ranks-agree": 2})
LOADS.row(
    "weights are loaded on one rank of tensor parallelism",
    loaded_on_one_rank,
    {"ranks-agree": 2},
    layout={"tp": 2},
)
LOADS.row("moments are not loaded", moments_lost, {}, why=NOT_WATCHED, **ADAM)


# ------------------------------------------------------------------------ saves and exports
def read_before_the_gather(read):
    def step_and_read(model, step):
        model.train_step(step)
        read(model.chunks[0])

    return step_and_read


for name, read in {
    "saved before the gather": lambda ddp: ddp.sharded_state_dict(),
    "exported before the gather": lambda ddp: ddp.module.state_dict(),
    "sent before the gather": lambda ddp: torch.distributed.broadcast(next(ddp.parameters()).data, 0),
}.items():
    LOADS.row(name, read_before_the_gather(read), {"gathered-when-read": 1}, **BOTH)


def saved_without_layers(model, step):
    from megatron.core.dist_checkpointing.serialization import save

    model.train_step(step)
    part = model.chunks[0].sharded_state_dict()
    for name in [name for name in part if name.endswith("input_layernorm.weight")]:
        del part[name]
    with contextlib.suppress(Exception):  # the folder is not there: only what is asked for counts
        save({"model": part}, "")


LOADS.row("a checkpoint lacks parameters", saved_without_layers, {"saved-what-is": 1})
