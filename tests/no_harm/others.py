"""Programs in which others hold what patches touch: processes, threads, tests, pickles, partials, libraries."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import hashlib
import importlib
import io
import multiprocessing
import operator
import pickle
import signal
import sys
import weakref
from collections import Counter
from unittest import mock

import torch

from megapatch.testing._data import forward_step

from .own_classes import everything, functions, methods, objects
from .table import LONGEST
from .table import program as _program
from .trainer import is_weight, parts_of, scaled

program = functools.partial(_program, seldom=True)
FEW = ("fp32", "bf16, sharded")
MANY = ("fp16", "fp32, sharded", "bf16, sharded, overlaps", "pp")


def described(value):
    """Return a value's type, and its contents in a digest; of an object with many, the names of what it has."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        text = str([(str(key), described(item)) for key, item in items])
        return type(value).__name__, hashlib.sha1(text.encode()).hexdigest()
    if torch.is_tensor(value):
        return str(value.dtype), hashlib.sha1(str(value.tolist()).encode()).hexdigest()
    return type(value).__name__, sorted(vars(value)) if hasattr(value, "__dict__") else str(value)


def tried(function, *args):
    """Return what a function returns, or the type of its exception: not all can be pickled in all layouts."""
    try:
        return function(*args)
    except Exception as error:
        return type(error).__name__


# ------------------------------------------------------------------------------------ processes and threads
CHILD = """
import pickle
pipe.send([str(type(pickle.loads(each))) for each in contents])
"""


@program(*FEW)
def children_unpickle_configs_states_and_functions(run):
    """A spawned child has no megapatch, unless something brings it."""
    trainer = run.trainer()
    trainer.train(0)
    sent = [copy.copy(trainer.model.config), trainer.model.ddp_config, parts_of(trainer.optimizer)[0].config]
    sent[0].grad_scale_func = None  # a method of the optimizer
    sent += [trainer.schedule.state_dict(), *(getattr(module, name) for module, name in functions())]
    pickled = [tried(pickle.dumps, each) for each in sent]
    run.note("pickled", [hashlib.sha1(repr(each).encode()).hexdigest() for each in pickled])
    contents = [each for each in pickled if isinstance(each, bytes)]
    contents += [pickle.dumps(each) for each in (trainer.weights(), trainer.optimizer.state_dict())]
    run.note("megapatch", [b"megapatch" in each for each in contents])
    trainer.train(1)
    signal.alarm(10 * LONGEST)  # a spawned child imports torch and Megatron, and no rank waits for this one
    for start in ("spawn", "fork") if run.rank == 0 else ():
        context = multiprocessing.get_context(start)
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=exec, args=(CHILD, {"pipe": theirs, "contents": contents}))
        child.start()
        theirs.close()
        run.note("child", ours.recv())
        child.join()


@program("fp16", "bf16, sharded, overlaps")
def a_forked_child_saves_the_optimizer_while_training_goes_on(run):
    trainer = run.trained()
    ours, theirs = multiprocessing.Pipe(duplex=False)
    state = functools.partial(trainer.optimizer.state_dict)
    child = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(described(state())))
    child.start()
    trainer.train(1)
    run.note("state", ours.recv())
    child.join()
    run.note("exit code", child.exitcode)


@program(*FEW, "pp, vpp")
def steps_from_a_thread(run):
    trainer = run.trainer()
    trainer.train(0)
    run.in_thread(trainer.train, 1)
    trainer.train(2)


@program("fp32", "bf16, sharded, overlaps")
def steps_and_loads_under_asyncio(run):
    trainer = run.trainer()

    async def main():
        trainer.train(0)
        weights = await asyncio.to_thread(trainer.weights)
        await asyncio.to_thread(trainer.train, 1)
        trainer.load(weights)
        trainer.optimizer.reload_model_params()
        await asyncio.to_thread(trainer.evaluate, 100)

    asyncio.run(main())
    trainer.train(2)


# ------------------------------------------------------------------------------------ mocks in users' tests
@program("fp32", "fp16, sharded", "bf16, sharded, overlaps")
def methods_mocked_with_their_specs(run):
    trainer, mocks = run.trainer(), {}
    with contextlib.ExitStack() as stack:
        for kind in dict.fromkeys(map(type, objects(trainer))):
            for name, method in methods(kind).items():
                mocked = mock.patch.object(kind, name, autospec=True, side_effect=method)
                mocks[f"{kind.__name__}.{name}"] = stack.enter_context(mocked)
        everything(trainer)
    # See the limits of megatron.scheduler-after-load and megatron.gathered-when-read.
    known = ("OptimizerParamScheduler.step", "DistributedDataParallel.state_dict")
    run.note("calls", {name: mocked.call_count for name, mocked in mocks.items() if name not in known})
    trainer.train(3)


@program("fp32", "pp")
def functions_mocked_away(run):
    trainer = run.trainer()
    for module, name in functions():
        before = getattr(module, name)
        with mock.patch(f"{module.__name__}.{name}", return_value=name) as mocked:
            run.note("mocked", (getattr(module, name)(1), mocked.call_count))
        run.note("as before", getattr(module, name) is before)
    everything(trainer)


@program(*FEW)
def a_module_imported_again_within_a_test(run):
    name, trainer = "megatron.core.optimizer_param_scheduler", run.trainer()
    with mock.patch.dict(sys.modules), mock.patch(name):
        del sys.modules[name]
        kind = importlib.import_module(name).OptimizerParamScheduler
    saved = trainer.schedule.state_dict()
    for schedule in (copy.copy(trainer.schedule), trainer.layout.schedule_of(trainer.optimizer)):
        schedule.__class__ = kind
        run.note("schedule", kind is type(trainer.schedule))
        trainer.schedule = schedule
        trainer.train(0)
    trainer.schedule = trainer.layout.schedule_of(trainer.optimizer)
    trainer.schedule.load_state_dict(saved)
    trainer.train(1)


@program(*MANY)
def specs_and_names_of_objects(run):
    trainer = run.trainer()
    everything(trainer)
    for each in objects(trainer):
        run.note("names", sorted(name for name in dir(each) if name not in dir(torch.nn.Module)))
        run.note("attributes", list(vars(each)))
        run.note("spec", tried(lambda each: sorted(dir(mock.Mock(spec=each))), each))


# ------------------------------------------------------------------------------------ pickles and copies
@program(*FEW, "fp16")
def a_schedule_copied_with_its_optimizer_kept(run):
    trainer = run.trainer()
    trainer.train(0)
    memo = {id(trainer.optimizer): trainer.optimizer}
    trainer.schedule = copy.deepcopy(trainer.schedule, memo)
    trainer.train(1)


@program("fp32", "bf16", "fp16")
def states_through_torchs_files(run):
    trainer = run.trainer()
    trainer.train(0)
    file = io.BytesIO()
    torch.save((trainer.weights(), trainer.optimizer.state_dict(), trainer.schedule.state_dict()), file)
    run.note("file", hashlib.sha1(file.getvalue()).hexdigest())
    run.note("safe", type(tried(lambda: torch.load(io.BytesIO(file.getvalue()), weights_only=True))).__name__)
    weights, state, schedule = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    trainer.train(1)
    trainer.load(weights)
    trainer.optimizer.load_state_dict(state)
    trainer.schedule = trainer.layout.schedule_of(trainer.optimizer)
    trainer.schedule.load_state_dict(schedule)
    trainer.train(2)


@program("fp32", "bf16", "bf16, sharded")
def hooks_of_the_inner_optimizers_state(run):
    trainer, calls = run.trainer(), Counter()
    for part in parts_of(trainer.optimizer):
        for name in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
            hook = functools.partial(_counted, calls, name)
            getattr(part.optimizer, f"register_{name}_hook")(hook)
    trainer.train(0)
    trainer.load_optimizer(trainer.optimizer_state())
    trainer.disk.tree(loading=False)
    trainer.train(1)
    run.note("calls", dict(sorted(calls.items())))


def _counted(calls, name, *arguments):
    calls[name, len(arguments)] += 1


# ------------------------------------------------------------------------------------ partials
@program("bf16, overlapped reduce", "bf16, sharded, overlaps", "pp, vpp", "fp16")
def hooks_of_the_config_as_partials(run):
    trainer = run.trainer()
    config, made = trainer.model.config, {}
    for name in ("grad_scale_func", "finalize_model_grads_func", "no_sync_func", "grad_sync_func"):
        given = getattr(config, name)
        made[name] = [functools.partial(each) for each in given] if isinstance(given, list) else given
        if callable(given):
            made[name] = functools.partial(given)
        setattr(config, name, made[name])
    everything(trainer)
    run.note("kept", [getattr(config, name) is each for name, each in made.items()])


@program(*FEW)
def a_schedule_with_partial_methods(run):
    trainer = run.trainer()
    kind = type(trainer.schedule)
    names = ("step", "state_dict", "load_state_dict")
    own = {name: functools.partialmethod(getattr(kind, name)) for name in names}
    trainer.schedule.__class__ = type(kind.__name__, (kind,), own)
    saved = trainer.schedule.state_dict()
    trainer.train(0, 1)
    trainer.schedule = trainer.layout.schedule_of(trainer.optimizer)
    trainer.schedule.__class__ = type(kind.__name__, (kind,), own)
    trainer.schedule.load_state_dict(saved)
    trainer.train(2)


@program("fp32", "bf16, overlapped reduce", "pp", "pp, vpp")
def a_schedule_of_passes_kept_from_the_beginning(run):
    pipeline = importlib.import_module("megatron.core.pipeline_parallel")
    kept = functools.partial(pipeline.get_forward_backward_func())
    trainer = run.trainer()
    with mock.patch.object(pipeline, "get_forward_backward_func", return_value=kept):
        everything(trainer)


@program(*MANY)
def methods_called_by_their_classes(run):
    trainer = run.trainer()
    for data in range(3):
        for chunk in trainer.model.chunks:
            type(chunk).zero_grad_buffer(chunk)
        type(trainer.optimizer).zero_grad(trainer.optimizer)
        trainer.backward(data)
        run.note("gradient norm", operator.methodcaller("step")(trainer.optimizer)[:2])
        type(trainer.schedule).step(trainer.schedule, 1)


# ------------------------------------------------------------------------------------ kept by others
@program("fp32", "fp16, sharded", "bf16, sharded, overlaps")
def one_chain_of_two_models_optimizers(run):
    trainers = [run.trainer() for _ in range(2)]
    kind = importlib.import_module("megatron.core.optimizer.optimizer").ChainedOptimizer
    chain = kind([part for trainer in trainers for part in parts_of(trainer.optimizer)])
    for data in range(3):
        for trainer in trainers:
            trainer.model.zero_grad()
            trainer.backward(data)
        run.note("gradient norm", chain.step()[:2])
        chain.zero_grad()


@program(*FEW, "fp16")
def a_schedule_of_torchs_over_inner_optimizers(run):
    trainer = run.trainer()
    rates = [
        torch.optim.lr_scheduler.LambdaLR(part.optimizer, lambda step: 0.5**step)
        for part in parts_of(trainer.optimizer)
    ]
    for data in range(3):
        trainer.model.zero_grad()
        trainer.backward(data)
        run.note("gradient norm", trainer.optimizer.step()[:2])
        for rate in rates:
            rate.step()
            run.note("rates", rate.get_last_lr())
    run.note("state", str([rate.state_dict() for rate in rates]))


@program("fp32", "bf16", "tp, dropout")
def an_average_kept_by_torch(run):
    trainer = run.trainer()
    averaged = [tried(torch.optim.swa_utils.AveragedModel, gpt) for gpt in trainer.models()]
    run.note("averaged", [type(each).__name__ for each in averaged])
    for data in range(2):
        trainer.train(data)
        for average, gpt in zip(averaged, trainer.models(), strict=True):
            if isinstance(average, torch.nn.Module):
                average.update_parameters(gpt)
                run.note("average", [each.detach() for each in average.parameters()])


@program("fp32", "fp16", "bf16, sharded")
def an_optimizer_kept_weakly(run):
    trainer = run.trainer()
    optimizer, table = trainer.optimizer, weakref.WeakKeyDictionary()
    table[optimizer], table[trainer.schedule] = "optimizer", "schedule"
    trainer.optimizer = weakref.proxy(optimizer)
    trainer.schedule = trainer.layout.schedule_of(trainer.optimizer)
    everything(trainer)
    run.note("table", sorted(table.values()))
    trainer.optimizer = optimizer


@program("fp32", "bf16", "fp16", "fp32, sharded", "bf16, sharded")
def groups_and_states_kept_over_steps_and_loads(run):
    trainer = run.trainer()
    inner = [part.optimizer for part in parts_of(trainer.optimizer)]

    def held():
        groups = [group for each in inner for group in each.param_groups]
        states = [value for each in inner for state in each.state.values() for value in (state, *state.values())]
        return [each.param_groups for each in inner] + groups + [group["params"] for group in groups] + states

    trainer.train(0)
    kept, groups = held(), inner[0].param_groups
    for change in (
        lambda: trainer.train(1),
        lambda: trainer.load(trainer.weights()),
        lambda: trainer.optimizer.reload_model_params(),
        lambda: trainer.disk.tree(loading=False),
    ):
        change()
        run.note("one object", [one is two for one, two in zip(kept, held(), strict=False)])
    for group in groups:
        group["max_lr"] = 0.01
    trainer.train(2)


@program("fp32", "bf16")
def other_weights_by_a_functional_call(run):
    trainer = run.trainer()
    trainer.train(0)
    (gpt,) = trainer.models()
    (state,) = scaled([gpt.state_dict()], 0.5)
    state = {name: value for name, value in state.items() if is_weight(value)}

    def call(*args, **kwargs):
        return torch.func.functional_call(gpt, state, args, kwargs)

    with torch.no_grad(), mock.patch.object(gpt, "forward", wraps=gpt.forward) as forward:
        output, loss_of = forward_step(iter(trainer.model.microbatches(5, 1)), gpt, two_tuple=True)
        run.note("loss", loss_of(output)[0])
        args, kwargs = forward.call_args
    with torch.no_grad():
        run.note("loss", loss_of(call(*args, **kwargs))[0])
    trainer.train(1)


# ------------------------------------------------------------------------------------ configs
@program("fp32", "bf16", "pp", "moe")
def a_copy_of_the_config_for_an_evaluation(run):
    trainer = run.trainer()
    own = trainer.model.config
    trainer.train(0)
    other = copy.copy(own)
    other.finalize_model_grads_func = other.grad_scale_func = other.no_sync_func = other.grad_sync_func = None
    modules = [each for chunk in trainer.model.chunks for each in chunk.modules()]
    users = [each for each in modules if getattr(each, "config", None) is own]
    for config in (other, own):
        for module in users:
            module.config = config
        trainer.evaluate(100)
        run.note("config", {name: type(value).__name__ for name, value in vars(config).items()})
    trainer.train(1)


@program("fp16", "bf16, overlapped reduce", "bf16, sharded, overlaps", "pp, vpp")
def one_config_that_is_filled_for_each_model(run):
    trainers = [run.trainer() for _ in range(2)]
    fields = [dict(vars(trainer.model.config)) for trainer in trainers]
    shared = trainers[0].model.config
    for module in (module for chunk in trainers[1].model.chunks for module in chunk.modules()):
        if hasattr(module, "config"):
            module.config = shared
    for data in range(2):
        for trainer, own in zip(trainers, fields, strict=True):
            vars(shared).update(own)
            trainer.train(data)
            run.note("config", [name for name, value in own.items() if vars(shared)[name] is not value])


# ------------------------------------------------------------------------------------ hooks
@program(*MANY, "moe")
def hooks_of_torch_for_all_modules_and_optimizers(run):
    trainer, calls = run.trainer(), Counter()
    modules, optimizers = torch.nn.modules.module, importlib.import_module("torch.optim.optimizer")

    def noting(name):
        return lambda each, *arguments: calls.update([(name, type(each).__name__, len(arguments))])

    handles = [
        *(getattr(modules, f"register_module_{name}_hook")(noting(name)) for name in ("forward_pre", "forward")),
        *(getattr(optimizers, f"register_optimizer_step_{name}_hook")(noting(name)) for name in ("pre", "post")),
    ]
    try:
        everything(trainer)
    finally:
        for handle in handles:
            handle.remove()
    run.note("calls", sorted(calls.items()))


@program("fp32", "bf16, sharded, overlaps", "pp", "moe")
def hooks_that_remove_themselves_or_go_backward(run):
    trainer, calls = run.trainer(), Counter()

    def once(name):
        def hook(*arguments):
            calls[name, len(arguments)] += 1
            if name in handles:  # else a graph from before it was removed has it
                handles.pop(name).remove()

        return hook

    handles = {}
    for chunk in trainer.model.chunks:
        for name, module in chunk.named_modules():
            for kind in ("forward_pre", "forward", "full_backward"):
                if kind != "full_backward" or isinstance(module, torch.nn.LayerNorm):
                    key = kind, name
                    handles[key] = getattr(module, f"register_{kind}_hook")(once(key))
    everything(trainer)
    run.note("calls", sorted(calls.items()))


@program("fp32", "bf16", "bf16, overlapped reduce", "bf16, sharded, overlaps")
def hooks_where_gradients_are_accumulated(run):
    trainer, calls = run.trainer(), Counter()
    for number, parameter in enumerate(trainer.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda each, number=number: calls.update([number]))
        parameter.register_hook(lambda gradient, number=number: calls.update([-number]))
    everything(trainer)
    run.note("calls", sorted(calls.items()))


@program("fp32", "bf16, sharded", "tp", "moe")
def tensors_of_the_graph_packed(run):
    trainer, calls = run.trainer(), Counter()
    trainer.model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: calls.update(["packed"]) or each.detach().clone(), lambda each: calls.update(["used"]) or each
    ):
        trainer.backward(0)
    trainer.update()
    run.note("calls", sorted(calls.items()))
    trainer.train(1)
