"""Normal calls of Megatron's functions, and a few that it refuses: after each of them all state is looked at.

A program is a generator of (the call in words, its result). What it yields is called before and looked at after.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import os
import types
from unittest import mock

import torch
from rigs.megatron.options import attempt
from rigs.megatron.save import minor

from megapatch._mcore.bucket_groups import bucket_groups
from megapatch.testing import MegatronLoop
from megapatch.testing._data import forward_step

from .layouts import DENSE, EVERY, OFFLOADED, ON_DISKS, SHARDS, here
from .own_classes import is_decorated, specified
from .steps import unfinished
from .trainer import parts_of

CALLS = {}
"""By name, a program and the layouts in which it runs."""


def calls(*layouts, oldest=12):
    """Put a program into the table, by its name, for Megatrons from this minor version on."""

    def add(function):
        if minor() >= oldest:
            CALLS[function.__name__.replace("_", " ")] = function, here(layouts)
        return function

    return add


# ------------------------------------------------------------------------------------------ users' own classes
class OwnAdam(torch.optim.AdamW):
    """Has one count of steps for all, lists its parameters whenever a state is loaded, and pickles all it has."""

    @torch.no_grad()
    def step(self, closure=None):
        having = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, _ in having:
            state = self.state[parameter]
            if not state:
                state["step"] = self.count = getattr(self, "count", torch.zeros(()))
                state.update({name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")})
        for count in {id(state["step"]): state["step"] for state in self.state.values()}.values():
            count += 1
        for parameter, group in having:
            self._move(parameter, self.state[parameter], group["lr"], *group["betas"])

    @staticmethod
    def _move(parameter, state, rate, beta1, beta2):
        state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
        state["exp_avg_sq"].lerp_(parameter.grad.square(), 1 - beta2)
        rate *= (1 - beta2 ** state["step"].item()) ** 0.5 / (1 - beta1 ** state["step"].item())
        parameter.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt() + 1e-8, value=-rate)

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.listed = [parameter for group in self.param_groups for parameter in group["params"]]

    def __getstate__(self):
        return self.__dict__


def own_schedule(schedule):
    """Let a schedule note how often it was stepped."""

    class OwnSchedule(type(schedule)):
        def step(self, increment):
            self.steps = (*getattr(self, "steps", ()), increment)
            return super().step(increment)

    schedule.__class__ = OwnSchedule
    return schedule


def new_schedule(trainer):
    trainer.schedule = own_schedule(trainer.layout.schedule_of(trainer.optimizer))
    return trainer.schedule


def own_trainer(run, **options):
    """Return a trainer whose inner optimizers and schedule are of the user's own classes."""
    with mock.patch.object(torch.optim, "AdamW", OwnAdam):
        trainer = run.trainer(**options)
    new_schedule(trainer)
    return trainer


# ------------------------------------------------------------------------------------------ programs
@calls(*EVERY)
def a_step_call_by_call(run):
    trainer = own_trainer(run)
    model, optimizer = trainer.model, trainer.optimizer
    yield "building", model
    for data in (0, 1):
        yield "zero_grad_buffer()", [chunk.zero_grad_buffer() for chunk in model.chunks]
        optimizer.zero_grad()
        yield "forward_backward()", model.forward_backward(data, two_tuple=True)
        yield "optimizer.step()", optimizer.step()
    yield "schedule.step()", trainer.schedule.step(increment=1)
    yield "evaluation", trainer.evaluate(100)
    trainer.model.zero_grad()
    yield "forward_backward() that is left out", trainer.backward(2)
    yield "zero_grad_buffer() after it", model.zero_grad()
    trainer.backward(5)
    yield "prepare_grads()", optimizer.prepare_grads()
    yield "step_with_ready_grads()", optimizer.step_with_ready_grads()
    model.zero_grad()
    trainer.backward(7)
    yield "optimizer.step() of each part", [part.step() for part in parts_of(optimizer)]
    yield "a whole step", trainer.train(6)
    model.zero_grad()
    if not model.ddp_config.overlap_grad_reduce:
        with unfinished(trainer):
            yield "forward_backward() without finalize", trainer.backward(3)
        yield "zero_grad_buffer() in between", [chunk.zero_grad_buffer() for chunk in model.chunks]


@calls(*DENSE, *SHARDS, *OFFLOADED, "bf16, sharded, overlaps", "pp, vpp", "tp, dropout", "moe", "ep")
def loads_and_what_is_read(run):
    trainer = own_trainer(run)
    model = trainer.model
    trainer.train(0)
    weights = trainer.weights()
    whole = [chunk.state_dict_for_save_checkpoint() for chunk in model.chunks]
    layout = trainer.layout
    # An offloaded optimizer has none, and that of fp32 shards does not copy.
    has_state = not layout.offload and (layout.has_main_parameters or not layout.is_sharded)
    state = trainer.optimizer_state() if has_state else None
    yield "state_dict() of the model and the optimizer", (weights, whole, state)
    yield "sharded_state_dict()", trainer.disk.tree(loading=False)
    if layout.is_sharded and not (
        layout.offload or layout.is_pipeline or layout.options.get("overlap_param_gather")
    ):
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
        sharded = {"model": trainer.models()[0].sharded_state_dict()}
        yield "the same, reshardable", trainer.optimizer.sharded_state_dict(sharded, metadata=metadata)
    trainer.train(1)
    trainer.load(weights)
    yield "load_state_dict() of the model, twice", trainer.load(weights)
    if not layout.offload:  # which a patch repairs at once
        yield "reload_model_params()", trainer.optimizer.reload_model_params()
    yield "broadcast_params()", [chunk.broadcast_params() for chunk in model.chunks]
    if has_state:
        for number in ("", ", again"):
            trainer.optimizer.load_state_dict(copy.deepcopy(state[0][0]))
            yield f"load_state_dict() of the optimizer{number}", None
        yield "sharded_state_dict() after the load", trainer.disk.tree(loading=False)
        yield "a load that is refused", attempt(trainer.optimizer.load_state_dict, [])
    saved = trainer.schedule.state_dict()
    new_schedule(trainer)  # a load into one that has been stepped is meant to differ
    yield "load_state_dict() of the schedule", trainer.schedule.load_state_dict(saved)
    yield "a load of the schedule that is refused", attempt(new_schedule(trainer).load_state_dict, {})
    yield "the random streams' states", streams_put_back()
    yield "a step after the loads", trainer.train(2)
    strict = [{name: value for name, value in state.items() if "final" not in name} for state in weights]
    yield "a load of the model that is refused", attempt(trainer.load, strict)[0]
    yield "a step after that", trainer.train(3)


def streams_put_back():
    tracker = importlib.import_module("megatron.core.tensor_parallel").get_cuda_rng_tracker()
    return tracker.set_states(tracker.get_states())


@calls("bf16, overlapped reduce", "bf16, sharded, overlaps", "fp32, sharded, overlaps", "pp, vpp", "pp")
def overlaps_by_hand(run):
    trainer = own_trainer(run)
    model = trainer.model
    trainer.train(0)
    model.zero_grad()
    with contextlib.ExitStack() as stack:
        for chunk in model.chunks:
            stack.enter_context(chunk.no_sync())
        yield "no_sync() is entered", model
        with unfinished(trainer), mock.patch.object(model.config, "no_sync_func", None):
            if not trainer.layout.is_pipeline:
                yield "forward_backward() in no_sync()", trainer.backward(1)
    yield "no_sync() is left", model
    with unfinished(trainer):
        trainer.backward(2)
    for chunk in model.chunks:
        yield "finish_grad_sync()", chunk.finish_grad_sync()
    yield "optimizer.step()", trainer.update()
    if model.ddp_config.overlap_param_gather:
        yield "a start of gathers", start_gathers(model)
        yield "gather_parameters()", model.gather_parameters()
        yield "disable_forward_pre_hook()", [chunk.disable_forward_pre_hook() for chunk in model.chunks]
        yield "evaluation without hooks", trainer.evaluate(100)
        yield "enable_forward_pre_hook()", [chunk.enable_forward_pre_hook() for chunk in model.chunks]
    yield "a step after that", trainer.train(3)
    if not trainer.layout.is_pipeline:
        (chunk,) = model.chunks
        model.zero_grad()
        with chunk.no_sync(), mock.patch.object(model.config, "no_sync_func", None), unfinished(trainer):
            trainer.backward(4)
        for group in reversed(bucket_groups(chunk)):
            yield "the reduce of a bucket group by hand", (group.start_grad_sync(), group.finish_grad_sync())
        yield "optimizer.step() after it", trainer.update()


def start_gathers(model):
    """Start them, and wait for them as such: the walk would read parameters that are being written."""
    for chunk in model.chunks:
        chunk.start_param_sync()
    for group in (group for chunk in model.chunks for group in bucket_groups(chunk)):
        if group.param_gather_handle is not None:
            group.param_gather_handle.wait()


@calls("bf16, overlapped reduce", "fp32, sharded, overlaps")
def gradients_zeroed_by_hand(run):
    trainer = own_trainer(run)
    for data in range(3):
        for buffer in trainer.model.chunks[0].buffers:
            buffer.grad_data.zero_()
        yield f"step {data}", (trainer.backward(data), trainer.update())


@calls(*ON_DISKS, "fp32", oldest=16)
def saves_and_their_loads(run):
    trainer = own_trainer(run)
    trainer.train(0)
    trainer.model.gather_parameters()
    yield "a save", trainer.disk.save(f"{run.folder}/first")
    trainer.model.gather_parameters()
    path = trainer.disk.begin(f"{run.folder}/background")
    yield "a save in the background begins", path
    trainer.train(1)
    yield "it ends", trainer.disk.finish()
    trainer.model.gather_parameters()
    # It has the plan of the first one, and the present count of steps: a load in buckets keeps that.
    yield "another save", trainer.disk.save(f"{run.folder}/second")
    trainer.model.gather_parameters()
    yield "a read that is refused", attempt(trainer.disk.read, f"{run.folder}/nowhere")[0]
    read = trainer.disk.read(f"{run.folder}/second")
    yield "a read", read
    yield "the weights are loaded", trainer.disk.load_weights(read)
    yield "the optimizer is loaded", trainer.disk.load_optimizer(read)
    new_schedule(trainer)
    yield "the schedule is loaded", trainer.disk.load_schedule(read)
    yield "a step after the load", trainer.train(2)
    trainer.model.gather_parameters()
    yield "a save after the load", trainer.disk.save(f"{run.folder}/third")
    checkpointing = importlib.import_module("megatron.core.dist_checkpointing")
    if "verify_integrity" in inspect.signature(checkpointing.save).parameters:
        path = f"{run.folder}/hashed"
        if run.rank == 0:
            os.makedirs(path)
        torch.distributed.barrier()
        save = functools.partial(checkpointing.save, verify_integrity=True, async_strategy="mcore")
        yield "a save with hashes", save(trainer.disk.tree(loading=False), path, trainer.disk.strategy)
    yield "metadata of its tensors", checkpointing.load_tensors_metadata(f"{run.folder}/third")
    if not trainer.layout.is_pipeline:  # there ranks ask for different tensors
        asked = dict(trainer.models()[0].sharded_state_dict())
        asked.pop(next(iter(asked)))
        load = functools.partial(checkpointing.load, asked, f"{run.folder}/third")
        yield "a load of what is asked for", [load(strict=strict) for strict in ("log_all", "return_all")]


@calls("fp32", "bf16")
def layouts_in_turn(run):
    state = importlib.import_module("megatron.core.parallel_state")
    trainer = own_trainer(run)
    trainer.train(0)
    group = trainer.model.chunks[0].dp_cp_group if hasattr(trainer.model.chunks[0], "dp_cp_group") else None
    run.trainers.clear()
    yield "a model is dropped", group
    yield "destroy_model_parallel()", state.destroy_model_parallel()
    yield "initialize_model_parallel()", state.initialize_model_parallel()
    yield "a second layout", (state.destroy_model_parallel(), state.initialize_model_parallel())
    yield "its group is used", torch.distributed.all_reduce(torch.ones(1), group=state.get_data_parallel_group())
    run.layout.set_up()
    trainer = own_trainer(run)
    yield "a model in it", trainer.train(0)


@calls("fp32", "bf16, sharded")
def what_inspect_says(run):
    trainer = own_trainer(run)
    yield "building", None
    found = specified(trainer).items()
    yield "signature()", {name: str(inspect.signature(each)) for name, each in found}
    plain = {name: str(inspect.getfullargspec(each)) for name, each in found if not is_decorated(each)}
    yield "getfullargspec()", plain


@calls("fp32")
def a_rerun_machine(run):
    from rigs.megatron.options import iterate, new_machine, rerun_data

    machine = new_machine()
    data = rerun_data(run.rank)
    for number in range(3):
        yield f"iteration {number}", (machine, iterate(machine, data))
        if minor() >= 18:  # before, it depends on a rerun, which a patch repairs
            yield "its state", machine.state_dict(data, "torch_dist")
    importlib.import_module("megatron.core.rerun_state_machine").destroy_rerun_state_machine()
    yield "it is destroyed", None


# ------------------------------------------------------------------------------------------ Megatron's train()
class Wrapping:
    """A hook of the user's: in the second forward pass it wraps the optimizer's step, for good."""

    def __init__(self, optimizer):
        self.optimizer, self.calls = optimizer, 0

    def __call__(self, module, inputs):
        self.calls += 1
        if self.calls == 2:
            self.optimizer.step = self.step

    def step(self):
        self.steps = getattr(self, "steps", 0) + 1
        return type(self.optimizer).step(self.optimizer)


@calls("fp32", "bf16", "bf16, overlapped reduce", "bf16, sharded, overlaps", oldest=17)
def megatrons_own_train(run):
    import megatron.training.checkpointing as checkpointing

    trainer = own_trainer(run, hooks=False)
    folder = f"{run.folder}/checkpoints"
    loop = MegatronLoop(
        trainer.model, two_tuple=True, flags=["--save", folder, "--load", folder, "--save-interval", "100"]
    )
    run.kept.append(loop)
    model = (trainer.model.chunks, trainer.optimizer, trainer.schedule)
    wrapping = Wrapping(trainer.optimizer)
    run.kept.append(wrapping)
    handle = trainer.model.chunks[0].module.register_forward_pre_hook(wrapping)
    # Once: another call is what a patch repairs.
    yield "train(), with a step that the user wraps meanwhile", loop.train(3)
    handle.remove()
    rerun = importlib.import_module("megatron.core.rerun_state_machine")
    evaluate = importlib.import_module("megatron.training.training").evaluate
    data = rerun.RerunDataIterator(iter(trainer.model.microbatches(100)))
    step = functools.partial(forward_step, two_tuple=True)
    of_model = (trainer.model.chunks, None, trainer.model.config)
    yield "evaluate()", evaluate(step, data, *of_model, eval_iters=1)
    save = functools.partial(checkpointing.save_checkpoint, num_floating_point_operations_so_far=0)
    yield "save_checkpoint()", save(3, *model, checkpointing_context=loop.checkpointing_context)
    yield "load_checkpoint()", checkpointing.load_checkpoint(*model)
    loop.args.finetune = True
    yield "load_checkpoint() to finetune", checkpointing.load_checkpoint(*model)
    loop.args.finetune = False
    loop.args.load, loop.args.pretrained_checkpoint = f"{folder}/nowhere", folder
    yield "load_checkpoint() of a pretrained one", checkpointing.load_checkpoint(*model)
    keep = checkpointing.cleanup_old_non_persistent_checkpoint
    yield "old checkpoints are removed", keep(folder) if run.rank == 0 else None
    torch.distributed.barrier()


# ------------------------------------------------------------------------------------------ what few layouts have
@calls("fp32", oldest=17)
def a_refit(run):
    refit = importlib.import_module("megatron.core.resharding.refit")
    unwrap = importlib.import_module("megatron.core.utils").unwrap_model
    sources, (chunk,) = (own_trainer(run).model.chunks for _ in range(2))
    for number in ("first", "second"):
        service = refit.GlooCopyService()
        yield f"the {number} refit", refit.swap_model_weights(unwrap(sources[0]), unwrap(chunk), service)


@calls("fp32", oldest=17)
def torchs_own_fsdp(run):
    from torch.distributed.device_mesh import DeviceMesh

    name = "megatron.core.distributed.torch_fully_sharded_data_parallel"
    mesh = types.SimpleNamespace(from_group=lambda group, device: DeviceMesh.from_group(group, "cpu"))
    trainer = own_trainer(run)
    layer = torch.nn.Linear(4, 2)
    torch.nn.init.ones_(layer.weight)
    module = importlib.import_module(name)
    with mock.patch.object(module, "DeviceMesh", mesh):
        fsdp = module.TorchFullyShardedDataParallel(trainer.model.config, trainer.model.ddp_config, layer)
    fsdp(torch.ones(1, 4)).sum().backward()
    yield "finish_grad_sync()", attempt(fsdp.finish_grad_sync)


@calls("fp32", oldest=16)
def a_reader_of_metadata(run):
    name = "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader"
    reader = importlib.import_module(name).CachedMetadataFileSystemReader
    trainer = own_trainer(run)
    trainer.train(0)
    path = trainer.disk.save(f"{run.folder}/saved")
    for number in ("first", "second"):
        yield f"the {number} read", (own := reader(path), own.read_metadata())


@calls("fp32", oldest=17)
def the_layer_wise_optimizer(run):
    from rigs.train_step.layer_wise import ALL_GATHER, layer_wise

    model = layer_wise()
    run.kept.append(model)
    try:
        for data in (0, 1):
            model.zero_grad()
            yield "forward_backward()", model.forward_backward(data, two_tuple=True)
            yield "optimizer.step()", model.optimizer.step()
    finally:
        torch.distributed.all_gather = ALL_GATHER
