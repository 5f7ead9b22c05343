"""Programs with a user's own subclasses, wrappers, mocks, hooks, copies and processes around what is patched."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import os
import pickle
import types
from collections import Counter
from unittest import mock

import torch

from megapatch._mcore.bucket_groups import bucket_groups

from .saves import AGREED
from .table import program
from .trainer import parts_of

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
FUNCTIONS = {
    SCHEDULES: (
        *("forward_step", "backward_step", "forward_backward_no_pipelining"),
        *("forward_backward_pipelining_with_interleaving", "forward_backward_pipelining_without_interleaving"),
    ),
    "megatron.core.parallel_state": ("initialize_model_parallel",),
    "megatron.core.dist_checkpointing.serialization": ("load", "save", "save_config"),
    "megatron.core.transformer.utils": ("get_default_causal_mask",),
}
"""Functions of modules that patches replace."""
OVERLAPPED = ("bf16, overlapped reduce", "bf16, sharded, overlaps", "pp, vpp")
SOME = ("fp32", "fp16", "fp32, sharded", "bf16, sharded, overlaps", "pp", "moe")


def functions():
    """Yield each module and name of FUNCTIONS."""
    for key, names in FUNCTIONS.items():
        for name in names:
            yield importlib.import_module(key), name


def objects(trainer):
    """Return what a trainer has whose class has patched methods."""
    chunks = trainer.model.chunks
    groups = [group for chunk in chunks for group in bucket_groups(chunk)]
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers]
    optimizers = dict.fromkeys((trainer.optimizer, *parts_of(trainer.optimizer)))
    return [*chunks, *trainer.models(), *groups, *buffers, *optimizers, trainer.schedule]


def methods(kind):
    """Return the public methods that Megatron gives a class, by name."""
    owners = [owner for owner in reversed(kind.__mro__) if owner.__module__.startswith("megatron.")]
    found = {name: each for owner in owners for name, each in vars(owner).items()}
    return {name: each for name, each in found.items() if is_method(name, each)}


def specified(trainer):
    """Return functions that patches replace, and all methods of a trainer's objects, by name."""
    found = {name: getattr(module, name) for module, name in functions()}
    for kind in dict.fromkeys(map(type, objects(trainer))):
        found |= {f"{kind.__name__}.{name}": each for name, each in methods(kind).items()}
    return found


def is_decorated(function):
    """Return whether it is, as by torch.no_grad(): of such getfullargspec() says less."""
    return inspect.getsource(function).lstrip().startswith("@")


def is_method(name, each):
    """Return whether this is Megatron's, and public: patches replace some that are inherited from torch.

    They may ask more often for what is only read, and start the groups of a first step twice, as Megatron does.
    """
    is_megatrons = inspect.isfunction(each) and inspect.unwrap(each).__module__.startswith("megatron.")
    return is_megatrons and not name.startswith(("_", "get_")) and name != "start_grad_sync"


def everything(trainer):
    """Train, evaluate, load and read."""
    trainer.train(0, 1)
    trainer.evaluate(100)
    trainer.load(trainer.weights())
    trainer.optimizer.reload_model_params()
    trainer.disk.tree(loading=False)
    saved = trainer.schedule.state_dict()
    trainer.schedule = trainer.layout.schedule_of(trainer.optimizer)
    trainer.schedule.load_state_dict(saved)
    trainer.train(2)


def subclass(kind, calls):
    """Return a subclass whose methods note that they are called, and call those of Megatron."""

    def overridden(name, method):
        @functools.wraps(method)
        def own(self, *args, **kwargs):
            calls[f"{kind.__name__}.{name}"] += 1
            return getattr(super(kinds[0], self), name)(*args, **kwargs)

        return own

    kinds = [type(kind.__name__, (kind,), {name: overridden(name, each) for name, each in methods(kind).items()})]
    return kinds[0]


@program(*SOME, "bf16, overlapped reduce", "ep")
def subclasses_that_override_each_method(run):
    trainer, calls, kinds = run.trainer(), Counter(), {}
    for each in objects(trainer):
        kind = type(each)
        each.__class__ = kinds[kind] if kind in kinds else kinds.setdefault(kind, subclass(kind, calls))
    everything(trainer)
    run.note("calls", dict(sorted(calls.items())))


@program(*SOME)
def methods_wrapped_on_their_classes(run):
    trainer, calls = run.trainer(), Counter()

    def wrapped(name, method):
        @functools.wraps(method)
        def own(*args, **kwargs):
            calls[name] += 1
            return method(*args, **kwargs)

        return own

    bases = dict.fromkeys(base for each in objects(trainer) for base in type(each).__mro__)
    owners = [base for base in bases if base.__module__.startswith("megatron.")]
    before = [dict(vars(owner)) for owner in owners]
    with contextlib.ExitStack() as stack:
        for owner in owners:
            for name, each in list(vars(owner).items()):
                if is_method(name, each):
                    own = wrapped(f"{owner.__name__}.{name}", each)
                    stack.enter_context(mock.patch.object(owner, name, own))
        everything(trainer)
    for owner, kept in zip(owners, before, strict=True):
        run.note("as before", [name for name, each in kept.items() if vars(owner).get(name) is not each])
    # See the limits of megatron.scheduler-after-load and megatron.gathered-when-read.
    known = ("OptimizerParamScheduler.step", "_BaseDataParallel.state_dict", "DistributedDataParallel.state_dict")
    for name in known:
        calls.pop(name, None)
    run.note("calls", dict(sorted(calls.items())))
    trainer.train(3)


@program("fp32", "bf16, sharded, overlaps", "pp", "pp, vpp", changed=AGREED)
def functions_mocked_in_a_users_tests(run):
    trainer, counts = run.trainer(), {}
    for way in ("wraps", "side_effect"):
        mocks = {}
        with contextlib.ExitStack() as stack:
            for module, name in functions():
                options = {way: getattr(module, name), **({"autospec": True} if way == "side_effect" else {})}
                mocks[way, name] = stack.enter_context(mock.patch.object(module, name, **options))
            trainer.train(0)
            trainer.save(way)
        counts |= {each: mocked.call_count for each, mocked in mocks.items()}
    run.note("calls", counts)
    trainer.train(1)


@program("fp32", "bf16, sharded")
def what_inspect_says_of_each_method(run):
    trainer = run.trainer()
    for name, each in sorted(specified(trainer).items()):
        source = inspect.getsource(each)
        run.note("source", (source, inspect.unwrap(each).__code__.co_name, each.__doc__))
        run.note("signature", (name, str(inspect.signature(each))))
        if not is_decorated(each):
            run.note("arguments", str(inspect.getfullargspec(each)))
        run.note("kinds", (inspect.isgeneratorfunction(each), inspect.iscoroutinefunction(each)))
        if "<locals>" not in each.__qualname__:
            run.note("pickled", pickle.loads(pickle.dumps(each)) is each)
        run.note("copied", copy.deepcopy(each) is each)


@program(*SOME)
def hooks_on_each_module_and_parameter(run):
    trainer, calls = run.trainer(), Counter()

    def hook(name):
        def note(*arguments):
            calls[name, len(arguments)] += 1

        return note

    for chunk in trainer.model.chunks:
        for name, module in chunk.named_modules():
            module.register_forward_pre_hook(hook(f"before {name}"))
            module.register_forward_hook(hook(f"after {name}"))
            module.register_load_state_dict_pre_hook(hook(f"before a load of {name}"))
            module.register_load_state_dict_post_hook(hook(f"after a load of {name}"))
            module.register_state_dict_pre_hook(hook(f"before the state of {name}"))
            module.register_state_dict_post_hook(hook(f"after the state of {name}"))
        for name, parameter in chunk.named_parameters():
            parameter.register_hook(hook(f"gradient of {name}"))
    for number, part in enumerate(parts_of(trainer.optimizer)):
        part.optimizer.register_step_pre_hook(hook(f"before the step of {number}"))
        part.optimizer.register_step_post_hook(hook(f"after the step of {number}"))
        part.optimizer.register_load_state_dict_post_hook(hook(f"after a load of optimizer {number}"))
    everything(trainer)
    run.note("calls", sorted(calls.items()))


@program(*SOME)
def bound_methods_and_partials_from_before_the_first_step(run):
    trainer = run.trainer()
    chunks = trainer.model.chunks
    zero = [functools.partial(chunk.zero_grad_buffer) for chunk in chunks]
    step, zero_grad = trainer.optimizer.step, functools.partial(trainer.optimizer.zero_grad, set_to_none=True)
    trainer.optimizer.step = functools.partial(step)  # kept on the instance, over loads
    stepped = trainer.schedule.step
    for data in range(3):
        for each in zero:
            each()
        zero_grad()
        trainer.backward(data)
        run.note("gradient norm", trainer.optimizer.step()[:2])
        stepped(increment=1)
        trainer.load(trainer.weights())
        trainer.optimizer.reload_model_params()
    run.note("methods", [each.func == chunk.zero_grad_buffer for each, chunk in zip(zero, chunks, strict=True)])


class Around:
    """Stands for an object, and has all that it has."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(vars(self)["inner"], name)


@program("fp32", "fp16", "bf16, sharded", "bf16, sharded, overlaps")
def an_optimizer_within_another_object(run):
    trainer = run.trainer()
    trainer.optimizer = Around(trainer.optimizer)
    trainer.schedule = trainer.layout.schedule_of(trainer.optimizer)
    everything(trainer)
    trainer.optimizer = trainer.optimizer.inner


class AroundModel(torch.nn.Module):
    """Stands for a model that is wrapped already."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@program("fp32", "bf16, overlapped reduce", "bf16, sharded, overlaps", "pp", "pp, vpp")
def a_model_within_another_module(run):
    trainer = run.trainer()
    inner, trainer.model.chunks = trainer.model.chunks, [AroundModel(each) for each in trainer.model.chunks]
    run.raising(trainer.train, 0, 1)
    trainer.model.chunks = inner
    trainer.train(2)


@program("fp32", "bf16", "fp16, sharded", "moe")
def copies_of_what_a_trainer_has(run):
    trainer = run.trainer()
    trainer.train(0)
    (chunk,) = trainer.model.chunks
    for name, each in {
        "config": trainer.model.config,
        "DDP's config": trainer.model.ddp_config,
        "optimizer's config": parts_of(trainer.optimizer)[0].config,
        "schedule": trainer.schedule,
        "state of the schedule": trainer.schedule.state_dict(),
        "scaler": getattr(parts_of(trainer.optimizer)[0], "grad_scaler", None),
        "inner optimizers": [part.optimizer for part in parts_of(trainer.optimizer)],
        "weights": chunk.module.state_dict(),
    }.items():
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            try:
                made = make(each)
            except Exception as error:
                made = type(error)
            run.note("copied", (name, make.__name__, type(made).__name__, sorted(getattr(made, "__dict__", ()))))
    trainer.schedule = copy.copy(trainer.schedule)
    for group in (group for part in parts_of(trainer.optimizer) for group in part.param_groups):
        run.note("group", sorted(group))
    trainer.train(1)


@program("fp32", "bf16, sharded, overlaps")
def a_child_process_reads_the_model(run):
    trainer = run.trained()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            (gpt,) = trainer.models()
            total = sum(float(each.detach().double().sum()) for each in gpt.parameters())
            state = trainer.schedule.state_dict()
            trainer.schedule.load_state_dict(state)
            gpt.load_state_dict(gpt.state_dict())
            os.write(writing, repr((total, sorted(state))).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as file:
        run.note("child", file.read())
    os.waitpid(child, 0)
    trainer.train(1)


@program("fp32", "bf16", "fp16", "fp32, sharded")
def two_models_of_one_config(run):
    trainers = [run.trainer() for _ in range(2)]
    shared = trainers[0].model.config
    for module in (module for chunk in trainers[1].model.chunks for module in chunk.modules()):
        if getattr(module, "config", None) is trainers[1].model.config:
            module.config = shared
    trainers[1].model.config = shared
    for data in range(2):
        for trainer in trainers:
            trainer.train(data)
            run.note("config", {name: type(value).__name__ for name, value in vars(shared).items()})


@program("fp32", "bf16, sharded", "pp")
def methods_replaced_by_hand_on_instances(run):
    trainer, calls = run.trainer(), Counter()

    def own(method):
        def call(self, *args, **kwargs):
            calls[method.__name__] += 1
            return method(*args, **kwargs)

        return call

    for each in objects(trainer):
        for name in methods(type(each)):
            if not isinstance(each, torch.nn.Module) or name in (
                "no_sync",
                "zero_grad_buffer",
                "finish_grad_sync",
            ):
                setattr(each, name, types.MethodType(own(getattr(each, name)), each))
    everything(trainer)
    run.note("calls", dict(sorted(calls.items())))
