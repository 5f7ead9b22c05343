"""Patched functions that compiled code may call compile, in one graph, to the patched behaviour."""

import functools
import importlib
import os

import pytest
import torch
import wrapt
from rigs.chosen import all_are_chosen, chosen
from rigs.megatron.options import ADAM, BOTH, GRADS
from torch._dynamo.testing import CompileCounter

from megapatch.patches import PATCHES
from megapatch.testing import init_parallel, run_ranks, tiny_gpt

STRICT_LOAD = "megatron.core.dist_checkpointing.validation:maybe_report_missing_and_unexpected_keys"
DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
CORE = "megatron.core"
OPTIMIZERS = "megatron.core.optimizer:optimizer"
MIXED = f"{OPTIMIZERS}.MixedPrecisionOptimizer"
CHAINED = f"{OPTIMIZERS}.ChainedOptimizer"
FLOAT16 = f"{OPTIMIZERS}.Float16OptimizerWithFloat16Params"
DISTRIBUTED = "megatron.core.optimizer:distrib_optimizer.DistributedOptimizer"
BUFFER = "megatron.core.optimizer:_ParamAndGradBuffer"
RERUN = "megatron.core.rerun_state_machine:RerunStateMachine"


def disable_twice():
    ddp = tiny_gpt(**BOTH, hooks=True).chunks[0]
    ddp.disable_forward_pre_hook()  # that PyTorch's hooks are removed, no one can compile

    def call(x):
        ddp.disable_forward_pre_hook()
        return x + len(ddp.remove_forward_pre_hook_handles)

    return call


def enable_twice():
    ddp = tiny_gpt(**BOTH, hooks=False).chunks[0]

    def call(x):
        ddp.enable_forward_pre_hook()
        ddp.enable_forward_pre_hook()
        return x + len(ddp.remove_forward_pre_hook_handles)

    return call


def zero_held():
    """A bucket group whose learned counts were set aside for a step."""
    group = tiny_gpt(**GRADS).chunks[0].bucket_groups[0]
    group.is_first_batch = True
    group.golden_per_param_grad_ready_counts = dict.fromkeys(group.params, 1)

    def call(x):
        group.reset()
        return x + group.is_first_batch

    return call


def nest():
    ddp = tiny_gpt(**GRADS).chunks[0]

    def call(x):
        with ddp.no_sync():
            with ddp.no_sync():
                x = x * 2
            return x + ddp.bucket_groups[0].is_last_microbatch

    return call


def prepared(method, of="chain", **options):
    """Of an optimizer that finds an overflow, and is prepared again after `method`."""

    def make():
        model = tiny_gpt(dtype="fp16", **options)
        (child,) = model.optimizer.chained_optimizers
        child.is_stub_optimizer = True  # PyTorch's own step() is not for compiling
        child._unscale_main_grads_and_check_for_nan = lambda: True
        child.prepare_grads()
        owner = {"chain": model.optimizer, "child": child, "buffer": model.chunks[0].buffers[0]}[of]

        def call(x):
            getattr(owner, method)()
            child.prepare_grads()
            return x + child.grad_scaler._hysteresis_tracker

        return call

    return make


def save_idle():
    rerun = importlib.import_module("megatron.core.rerun_state_machine")
    machine = rerun.RerunStateMachine(mode=rerun.RerunMode.VALIDATE_RESULTS)
    return lambda x: x + (machine.state_dict(None, "torch_dist") is not None)


def step_without_fault():
    """With one, Megatron logs, which no one can compile."""
    rerun = importlib.import_module("megatron.core.rerun_state_machine")
    machine = rerun.RerunStateMachine(mode=rerun.RerunMode.VALIDATE_RESULTS)
    return lambda x: x + machine.should_checkpoint_and_exit()[0]


def load_strictly():
    validation = importlib.import_module("megatron.core.dist_checkpointing.validation")

    def call(x):
        validation.maybe_report_missing_and_unexpected_keys({"rerun_state_machine_state"}, set())
        return x + 1

    return call


# Targets that compiled code may call, each with what makes a function of a tensor that calls it.
CALLS = {
    f"{DDP}.disable_forward_pre_hook": disable_twice,
    f"{DDP}.enable_forward_pre_hook": enable_twice,
    f"{DDP}.no_sync": nest,
    f"{CORE}:distributed.param_and_grad_buffer._ParamAndGradBucketGroup.reset": zero_held,
    f"{MIXED}.prepare_grads": prepared("prepare_grads", of="child"),
    f"{MIXED}.step": prepared("step", of="child"),
    f"{MIXED}.step_with_ready_grads": prepared("step_with_ready_grads", of="child"),
    f"{CHAINED}.step": prepared("step"),
    f"{CHAINED}.step_with_ready_grads": prepared("step_with_ready_grads"),
    f"{FLOAT16}.zero_grad": prepared("zero_grad", of="child"),
    f"{DISTRIBUTED}.zero_grad": prepared("zero_grad", of="child", **ADAM, use_distributed_optimizer=True),
    f"{BUFFER}.reset": prepared("reset", of="buffer"),
    f"{RERUN}.should_checkpoint_and_exit": step_without_fault,
    f"{RERUN}.state_dict": save_idle,
    STRICT_LOAD: load_strictly,
}


def test_only_targets_are_called():
    """The others are plain functions as well, as the contract wants, but run outside of compiled code."""
    targets = {f"{site.module}:{path}" for patch in PATCHES for site in patch.sites for path in site.paths}
    assert targets >= CALLS.keys()


def compiled_and_eager(rank, world_size, targets):
    init_parallel()
    tiny_gpt()  # what Megatron itself compiles is not compiled here
    del os.environ["TORCHDYNAMO_DISABLE"]  # set by the CUDA stubs
    found = {}
    x = torch.arange(3.0)
    for target in targets:
        make = CALLS[target]
        eager = make()(x)
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(make(), backend=counter, fullgraph=True)(x)
        found[target] = counter.frame_count, eager.tolist(), compiled.tolist()
    return found


@pytest.mark.every_patch("megatron")
def test_compiled_is_as_eager():
    paths = [f"{site.module}:{path}" for patch in chosen(PATCHES) for site in patch.sites for path in site.paths]
    targets = [target for target in CALLS if target in paths]
    assert targets == list(CALLS) or not all_are_chosen()
    (found,) = run_ranks(compiled_and_eager, 1, targets)
    for target, (graphs, eager, compiled) in found.items():
        assert graphs == 1, f"{target} was not compiled"
        assert compiled == eager, target


def scaled(function, *args):
    return function(*args) * 2


def test_a_wrapt_proxy_would_lose_its_body():
    """Why megapatch installs plain functions: torch.compile looks through the proxy, without a word."""
    proxy = wrapt.FunctionWrapper(torch.sin, lambda wrapped, instance, args, kwargs: scaled(wrapped, *args))
    plain = functools.wraps(torch.sin)(functools.partial(scaled, torch.sin))
    x = torch.arange(3.0)
    assert not torch.equal(torch.compile(lambda x: proxy(x), backend="eager", fullgraph=True)(x), proxy(x))
    assert torch.equal(torch.compile(lambda x: plain(x), backend="eager", fullgraph=True)(x), proxy(x))
