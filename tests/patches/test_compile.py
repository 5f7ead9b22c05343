"""Everything patched compiles, in one graph, to the patched behaviour."""

from __future__ import annotations

import functools
import importlib

import torch
import wrapt
from megatron_rig import BOTH, GRADS

from megapatch.catalog import PATCHES
from megapatch.testing import init_parallel, run_ranks, tiny_gpt

STRICT_LOAD = "megatron.core.dist_checkpointing.validation:maybe_report_missing_and_unexpected_keys"
DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
RERUN = "megatron.core.rerun_state_machine:RerunStateMachine"


def disable_twice():
    ddp = tiny_gpt(**BOTH, hooks=True).chunks[0]

    def call(x):
        ddp.disable_forward_pre_hook()
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


def nest():
    ddp = tiny_gpt(**GRADS).chunks[0]

    def call(x):
        with ddp.no_sync():
            with ddp.no_sync():
                x = x * 2
            return x + ddp.bucket_groups[0].is_last_microbatch

    return call


def save_idle():
    rerun = importlib.import_module("megatron.core.rerun_state_machine")
    machine = rerun.RerunStateMachine(mode=rerun.RerunMode.VALIDATE_RESULTS)
    return lambda x: x + (machine.state_dict(None, "torch_dist") is not None)


def load_strictly():
    validation = importlib.import_module("megatron.core.dist_checkpointing.validation")

    def call(x):
        validation.maybe_report_missing_and_unexpected_keys({"rerun_state_machine_state"}, set())
        return x + 1

    return call


# Each target with what makes a function of a tensor that calls it.
CALLS = {
    f"{DDP}.disable_forward_pre_hook": disable_twice,
    f"{DDP}.enable_forward_pre_hook": enable_twice,
    f"{DDP}.no_sync": nest,
    f"{RERUN}.state_dict": save_idle,
    STRICT_LOAD: load_strictly,
}
# A training loop, with timers, files and signals: no one can compile it, patched or not.
NOT_COMPILED = {"megatron.training.training:train"}


def targets():
    return [f"{site.module}:{path}" for patch in PATCHES for site in patch.sites for path in site.replace]


def test_every_target_is_called_here():
    assert set(targets()) == set(CALLS) | NOT_COMPILED


def compiled_and_eager(rank, world_size):
    init_parallel()
    found = {}
    x = torch.arange(3.0)
    for target, make in CALLS.items():
        eager = make()(x)
        torch._dynamo.reset()
        compiled = torch.compile(make(), backend="eager", fullgraph=True)(x)
        found[target] = eager.tolist(), compiled.tolist()
    return found


def test_compiled_is_as_eager():
    (found,) = run_ranks(compiled_and_eager, 1)
    for target, (eager, compiled) in found.items():
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
