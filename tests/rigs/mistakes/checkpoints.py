"""Mistakes with weights, moments and schedules that are loaded, saved and exported."""

from __future__ import annotations

import copy
import tempfile
from unittest import mock

import torch

from megapatch._mcore.sharded_leaves import leaves
from rigs.megatron.options import ADAM, BOTH
from rigs.megatron.save import Saves
from rigs.mistakes import Table
from rigs.mistakes.schedules import schedule_of
from rigs.mistakes.weights import BF16, SHARDED, parts_of, put, reference_in

LOADS = Table("loads, saves and exports")


# ------------------------------------------------------------------------ loads
@LOADS.row("weights are loaded without the optimizer", {"main-params-agree": 3}, **BF16)
def loaded_without_the_optimizer(model, step):
    """A load of weights alone (SkyRL, verl, AReaL), in the last step."""
    if step == 2:
        model.chunks[0].load_state_dict(model.saved)
    model.saved = {
        name: tensor.clone() if isinstance(tensor, torch.Tensor) else tensor
        for name, tensor in model.chunks[0].state_dict().items()
    }
    model.train_step(step)


@LOADS.row("weights are loaded on one rank only", {"ranks-agree": 2})
@LOADS.row("weights are loaded on one rank of tensor parallelism", {"ranks-agree": 2}, layout={"tp": 2})
def loaded_on_one_rank(model, step):
    """A rank that missed a broadcast."""
    model.train_step(step)
    if step == 0 and torch.distributed.get_rank() == 1:
        for name, parameter in model.chunks[0].module.named_parameters():
            if name.endswith("final_layernorm.weight"):
                parameter.data[3] += 1e-3


def optimizer_loads(change):
    """Let the optimizer load, in step 1, what it has just saved, with a change."""

    def load_and_step(model, step):
        if step == 1:
            for part in parts_of(model.optimizer):
                change(part, copy.deepcopy(part.state_dict()))
        model.train_step(step)

    return load_and_step


def without_moments(optimizer, saved):
    """AReaL: the state of each parameter has step counts only."""
    for state in saved.get("optimizer", saved).get("state", {}).values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].zero_()
    optimizer.load_state_dict(saved)  # a distributed optimizer's moments are not in it


def and_loses_moments(optimizer, saved):
    optimizer.load_state_dict(saved)
    for state in optimizer.optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


def and_keeps_its_own_counts(optimizer, saved):
    """Megatron's load in place of the format dp_reshardable."""
    optimizer.load_state_dict(saved)
    for state in optimizer.optimizer.state.values():
        state["step"] = torch.tensor(7.0)


LOADS.row("moments are not loaded", {"loaded-is-there": 1}, **ADAM)(optimizer_loads(without_moments))
LOADS.row("moments are not loaded, sharded", {"loaded-is-there": 1}, **SHARDED)(optimizer_loads(without_moments))
LOADS.row("moments are lost after a load", {"kept-between-steps": 1}, **ADAM)(optimizer_loads(and_loses_moments))
LOADS.row("step counts are not loaded", {"loaded-is-there": 1}, **ADAM)(optimizer_loads(and_keeps_its_own_counts))


@LOADS.row("a schedule is loaded in place", {"loaded-is-there": 1}, **ADAM)
def schedule_loaded_in_place(model, step):
    """Megatron adds the steps that it loads to those that the schedule has made (SkyRL, miles)."""
    schedule = schedule_of(model)
    if step == 1:
        schedule.load_state_dict(schedule.state_dict())
    model.train_step(step)
    schedule.step(1)


@LOADS.row("the schedule is not loaded", {"resumed-together": 2}, **ADAM)
def schedule_not_loaded(model, step):
    """verl's default: a resumed optimizer has a new schedule."""
    if step == 2:
        for part in parts_of(model.optimizer):
            part.load_state_dict(copy.deepcopy(part.state_dict()))
        model.schedule = None
    schedule = schedule_of(model)
    model.train_step(step)
    schedule.step(1)


@LOADS.row("the schedule alone is loaded", {"resumed-together": 0}, **ADAM)
def only_the_schedule_loaded(model, step):
    """A resumed schedule has a new optimizer."""
    schedule = schedule_of(model)
    if step == 0:
        schedule.load_state_dict({**schedule.state_dict(), "num_steps": 5})
    model.train_step(step)
    schedule.step(1)


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
    also = {"kept-between-steps": 2} if name == "sent before the gather" else {}  # it overwrites shards
    LOADS.row(name, {"gathered-when-read": 1, **also}, **BOTH)(read_before_the_gather(read))


def plan(part):
    """Plan an asynchronous save to a folder that goes again, and return what there is to be written."""
    with tempfile.TemporaryDirectory() as folder:
        return Saves(torch.distributed.get_rank(), folder).plan_tree({"model": part})[1]


@LOADS.row("a checkpoint lacks parameters", {"saved-what-is": 1})
def saved_without_layers(model, step):
    model.train_step(step)
    part = model.chunks[0].sharded_state_dict()
    for name in [name for name in part if name.endswith("input_layernorm.weight")]:
        del part[name]
    plan(part)


def saved_in_two(model, step, lacks=""):
    """The layers are saved in a folder of their own, as towers may be, and the head as a copy in fp32."""
    model.train_step(step)
    model.gather_parameters()
    layers, others = {}, {}
    for name, leaf in model.chunks[0].sharded_state_dict().items():
        if lacks and name.endswith(lacks):
            continue
        if "output_layer.weight" in name:
            leaf.data, leaf.dtype = leaf.data.float(), torch.float32
        (layers if ".layers." in name else others)[name] = leaf
    plan(others)
    plan(layers)


@LOADS.row("two checkpoints lack the same layers", {"saved-what-is": 1}, **SHARDED)
def saved_in_two_without_layers(model, step):
    saved_in_two(model, step, lacks="input_layernorm.weight")


@LOADS.row("two checkpoints lack the head", {"saved-what-is": 1}, **SHARDED)
def saved_in_two_without_the_head(model, step):
    saved_in_two(model, step, lacks="output_layer.weight")


@LOADS.row("a checkpoint has the reference", {"saved-is-trained": 1}, **BF16)
@LOADS.row("a checkpoint has the reference, sharded", {"saved-is-trained": 1}, **SHARDED)
@LOADS.row("a checkpoint has the reference, in fp32", {"saved-is-trained": 1})
def saved_reference(model, step):
    """A checkpoint is saved while the reference is in the model."""
    model.train_step(step)
    with reference_in(model) as policy:
        plan(model.chunks[0].sharded_state_dict())
    put(model, policy)


@LOADS.row("a checkpoint has copies of the step before", {"saved-is-trained": 1})
def saved_copies(model, step):
    """A checkpoint is made of copies, which are those of the step before."""
    copies = model.chunks[0].sharded_state_dict()
    for leaf in leaves(copies):
        if isinstance(getattr(leaf, "data", None), torch.Tensor):
            leaf.data = leaf.data.clone()
    model.train_step(step)
    plan(copies)


@LOADS.row("a checkpoint is written after the next step", {"saved-is-trained": 2})
def written_after_the_next_step(model, step):
    """An asynchronous save begins when the next step has been made."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    model.train_step(step)
    if step:
        with mock.patch.object(AsyncCallsQueue, "_get_async_caller"):
            AsyncCallsQueue().schedule_async_request(model.planned)
    model.planned = plan(model.chunks[0].sharded_state_dict())
