"""Everything patched compiles, in one graph, to the patched behaviour."""

from __future__ import annotations

import functools
import importlib
import os

import torch
import wrapt
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


# Each target with what makes a function of a tensor that calls it.
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


def targets(*names):
    """Return the targets of these patches, or of all."""
    chosen = [patch for patch in PATCHES if patch.name in names or not names]
    return [f"{site.module}:{path}" for patch in chosen for site in patch.sites for path in site.paths]


NOT_COMPILED = {
    # A training loop, with timers, files and signals: no one can compile it, patched or not.
    "megatron.training.training:train",
    "megatron.training.training:train_step",
    "megatron.bridge.training.train:train",
    "megatron.bridge.training.train:train_step",
    *(
        f"{framework}.backends.megatron_utils.model:{name}"
        for framework in ("slime", "miles")
        for name in ("train", "train_one_step", "save")
    ),
    # Nor the schedules, nor what starts and ends a reduce.
    *(
        f"{CORE}:pipeline_parallel.schedules.forward_backward_{name}"
        for name in ("no_pipelining", "pipelining_without_interleaving", "pipelining_with_interleaving")
    ),
    f"{CORE}.distributed:TorchFullyShardedDataParallel.finish_grad_sync",
    *(f"{CORE}.pipeline_parallel:schedules.{name}" for name in ("forward_step", "backward_step")),
    f"{CORE}:distributed.param_and_grad_buffer._ParamAndGradBucketGroup.finish_grad_sync",
    f"{CORE}.distributed:param_and_grad_buffer._ParamAndGradBucketGroup.start_grad_sync",
    f"{CORE}.distributed:distributed_data_parallel.DistributedDataParallel.__init__",
    f"{CORE}.distributed:distributed_data_parallel.DistributedDataParallel.finish_grad_sync",
    f"{CORE}.distributed:distributed_data_parallel.DistributedDataParallel.zero_grad_buffer",
    # Nor the process groups.
    "megatron.core.parallel_state:initialize_model_parallel",
    # Nor the saving of checkpoints, in which ranks agree and write files.
    "megatron.core.dist_checkpointing.strategies.torch:TorchDistSaveShardedStrategy.async_save",
    "megatron.core.dist_checkpointing.strategies.fully_parallel:"
    "FullyParallelSaveStrategyWrapper.apply_saving_parallelization",
    # Nor gathers, what reads a whole model for a file or a stream or writes it, and what loads from there.
    *targets(
        "megatron.expert-streams-loaded",
        "megatron.fresh-metadata",
        "megatron.fully-reshardable-states",
        "megatron.gathered-when-read",
        "megatron.load-offloaded-state",
        "megatron.main-params-after-load",
        "megatron.override-after-load",
        "megatron.own-save-results",
        "megatron.reload-offloaded-params",
        "megatron.save-fails-everywhere",
        "megatron.scheduler-after-load",
        "megatron.strict-loads-with-new-torch",
        "skyrl.adapters-own-state",
        "skyrl.gathered-when-read",
        "slime.first-sync-pushes-actor",
    ),
    # Nor the building of a model, nor seeding, nor coroutines, nor what a worker does for its driver.
    *(
        f"{package}.{target}"
        for package in ("skyrl_train", "skyrl.backends.skyrl_train")
        for target in (
            "distributed.megatron.megatron_strategy:MegatronStrategy.set_seed",
            "workers.megatron.megatron_model_wrapper:MegatronModelWrapper.__init__",
            "workers.megatron.megatron_worker:MegatronPolicyWorkerBase.forward_backward",
            "workers.megatron.megatron_worker:MegatronPolicyWorkerBase.offload_to_cpu",
            "workers.megatron.megatron_worker:MegatronPolicyWorkerBase.optim_step",
            "workers.megatron.megatron_worker:MegatronPolicyWorkerBase.save_checkpoint",
            "inference_engines.inference_engine_client:InferenceEngineClient.pause_generation",
            "workers.worker_dispatch:WorkerDispatch.save_weights_for_sampler",
        )
    ),
    *(
        f"{package}.fully_async_trainer:FullyAsyncRayPPOTrainer.{name}"
        for package in ("skyrl_train", "skyrl.train")
        for name in ("train", "async_sync_policy_weights_to_inference_engines")
    ),
    # Nor what is called through Ray: a worker's part and a driver's, of NeMo-RL.
    *(target for target in targets() if target.startswith("nemo_rl.")),
    # Nor a step of verl's engine, with what is around it, and what a trainer asks of its replicas.
    *(target for target in targets() if target.startswith("verl.")),
    # Nor what makes and drives ms-swift's trainer.
    *(target for target in targets() if target.startswith("swift.")),
    # Nor a step of AReaL's and ROLL's, with what is around it.
    *(target for target in targets() if target.startswith(("areal.", "roll."))),
    # Nor the making of hooks.
    *(f"{setup}:_update_model_config_funcs" for setup in ("megatron.bridge.training.setup", "nemo.tron.setup")),
    # Nor the loading of an optimizer's state, which PyTorch's own is not compiled in.
    f"{FLOAT16}.load_state_dict",
    f"{DISTRIBUTED}.load_state_dict",
}


def test_every_target_is_called_here():
    assert set(targets()) == set(CALLS) | NOT_COMPILED


def compiled_and_eager(rank, world_size):
    init_parallel()
    tiny_gpt()  # what Megatron itself compiles is not compiled here
    del os.environ["TORCHDYNAMO_DISABLE"]  # set by the CUDA stubs
    found = {}
    x = torch.arange(3.0)
    for target, make in CALLS.items():
        eager = make()(x)
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(make(), backend=counter, fullgraph=True)(x)
        found[target] = counter.frame_count, eager.tolist(), compiled.tolist()
    return found


def test_compiled_is_as_eager():
    (found,) = run_ranks(compiled_and_eager, 1)
    assert found.keys() == CALLS.keys()
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
