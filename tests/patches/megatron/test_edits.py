"""A fork's edits: what changes nothing is not refused, and what a patch relies on is not removed unseen."""

import importlib
import warnings

import pytest
from rigs.megatron.edits import HARMLESS, another_body, edited, empty, with_name, without
from rigs.needs import needs_megatron
from rigs.renames import asked_for

from megapatch._dotted import find
from megapatch.patch import ABSENT, NEEDED, UNKNOWN
from megapatch.patches import PATCHES

BUFFER = "megatron.core.distributed.param_and_grad_buffer"
GROUP = "_ParamAndGradBucketGroup"
DDP = "megatron.core.distributed.distributed_data_parallel"
DATA_PARALLEL = "DistributedDataParallel"
OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
OPTIMIZERS = "megatron.core.optimizer.optimizer"
CHECKPOINTING = "megatron.core.dist_checkpointing"
TORCH = f"{CHECKPOINTING}.strategies.torch"
PARALLEL = f"{CHECKPOINTING}.strategies.fully_parallel"
WRITER = f"{CHECKPOINTING}.strategies.filesystem_async"
CALLS = f"{CHECKPOINTING}.strategies.async_utils"
SCHEDULER = "megatron.core.optimizer_param_scheduler"
STREAMS = "megatron.core.tensor_parallel.random"
SCHEDULES = "megatron.core.pipeline_parallel.schedules"
ROUTERS = "megatron.core.transformer.moe.moe_utils"
FINALIZE = "megatron.core.distributed.finalize_model_grads"
RERUN = "megatron.core.rerun_state_machine"
MACHINE = "RerunStateMachine"
TRAINING = "megatron.training.training"

KEEPS_GATHER = (BUFFER, f"{GROUP}.finish_grad_sync", without("param_gather_dispatched = False"))
HARMFUL = {
    "megatron.aux-loss-over-context-parallel": (
        (SCHEDULES, "backward_step", with_name("model_type", "another")),
        (ROUTERS, "MoEAuxLossAutoScaler.backward", with_name("main_loss_backward_scale", "another")),
    ),
    "megatron.expert-streams-loaded": (
        (STREAMS, "CudaRNGStatesTracker.set_states", with_name("states_", "another")),
        (STREAMS, "model_parallel_cuda_manual_seed", empty),
        (STREAMS, "model_parallel_cuda_manual_seed", another_body),
    ),
    "megatron.forward-pre-hook": (KEEPS_GATHER,),
    "megatron.gathered-when-read": (
        KEEPS_GATHER,
        (OPTIMIZER, "DistributedOptimizer.step_with_ready_grads", with_name("overlap_param_gather", "another")),
    ),
    "megatron.grad-ready-window": (
        (BUFFER, f"{GROUP}.register_grad_ready", empty),
        (BUFFER, f"{GROUP}.register_grad_ready", another_body),
        (BUFFER, f"{GROUP}.finish_grad_sync", without("self.start_grad_sync(")),
        (BUFFER, f"{GROUP}.reset", without("self.per_param_grad_ready_counts = {}")),
        (BUFFER, f"{GROUP}.reset", without("self.golden_per_param_grad_ready_counts = ")),
        (BUFFER, f"{GROUP}.reset", without("self.is_first_batch = False")),
        (BUFFER, f"{GROUP}.reset", without("self.is_last_microbatch = True")),
    ),
    "megatron.main-params-after-load": (
        (OPTIMIZERS, "MixedPrecisionOptimizer.step_with_ready_grads", empty),
        (OPTIMIZERS, "MixedPrecisionOptimizer.step_with_ready_grads", another_body),
        (OPTIMIZERS, "MixedPrecisionOptimizer.prepare_grads", empty),
    ),
    "megatron.nested-no-sync": (
        (DDP, f"{DATA_PARALLEL}.no_sync", without("is_last_microbatch = False")),
        (DDP, f"{DATA_PARALLEL}.no_sync", without("is_last_microbatch = True")),
    ),
    "megatron.own-save-results": ((WRITER, "FileSystemWriterAsync.get_save_function_and_args", empty),),
    "megatron.override-after-load": (
        (OPTIMIZERS, "FP32Optimizer.load_state_dict", empty),
        (OPTIMIZERS, "FP32Optimizer.load_state_dict", another_body),
        (SCHEDULER, "OptimizerParamScheduler.get_lr", another_body),
    ),
    "megatron.parameters-without-gradients": (
        (BUFFER, f"{GROUP}.register_grad_ready", empty),
        (BUFFER, f"{GROUP}.register_grad_ready", another_body),
        (BUFFER, f"{GROUP}.finish_grad_sync", empty),
        (BUFFER, f"{GROUP}.finish_grad_sync", another_body),
    ),
    "megatron.rerun-state-dict": ((RERUN, f"{MACHINE}.state_dict", without("ShardedObject(")),),
    "megatron.rerun-transient-fault": (
        (RERUN, f"{MACHINE}.should_checkpoint_and_exit", with_name("state", "another")),
        (RERUN, f"{MACHINE}.should_checkpoint_and_exit", with_name("RERUNNING_IN_PLACE", "another")),
    ),
    "megatron.save-fails-everywhere": (
        *((CALLS, "AsyncCallsQueue.maybe_finalize_async_calls", edit) for edit in (empty, another_body)),
    ),
    "megatron.save-plan-cache": (
        (PARALLEL, "FullyParallelSaveStrategyWrapper.async_save", empty),
        (PARALLEL, "FullyParallelSaveStrategyWrapper.async_save", another_body),
    ),
    "megatron.scheduler-after-load": (
        (SCHEDULER, "OptimizerParamScheduler.step", empty),
        (SCHEDULER, "OptimizerParamScheduler.step", with_name("num_steps", "another")),
    ),
    "megatron.strict-loads-with-new-torch": (
        (TORCH, "TorchDistLoadShardedStrategy.load_sharded_metadata", empty),
        (TORCH, "TorchDistLoadShardedStrategy.load_sharded_metadata", another_body),
    ),
    "megatron.torch-fsdp2-finalize": ((FINALIZE, "finalize_model_grads", empty),),
    "megatron.train-reentry": ((TRAINING, "train", without("'interval-time'")),),
    "megatron.zero-tokens": (
        (SCHEDULES, "forward_step", with_name("forward_step_func", "another")),
        (SCHEDULES, "forward_step", with_name("config", "another")),
    ),
}
"""Edits beyond a target's body that remove a thing that a patch relies on: by patch, (module, path, edit).

Names that a diagnosis asks for are renamed by a test of their own.
"""

BODY_DOES_NOT_MATTER = {
    "megatron.gathered-when-read": (
        "__init__",
        "start_param_sync",
        "broadcast_params",
        "save_checkpoint",
        "reshard_model_weights",
    ),
    "megatron.groups-destroyed": ("initialize_model_parallel",),
    "megatron.main-params-after-load": ("__init__", "_copy_model_grads_to_main_grads", "prepare_grads", "load"),
    "megatron.override-after-load": ("load_state_dict", "__init__"),
    "megatron.parameters-without-gradients": ("start_grad_sync",),
    "megatron.prepare-grads-once": ("step_with_ready_grads", "zero_grad", "load_state_dict", "reset"),
    "megatron.save-fails-everywhere": ("save_config", "save_integrity_manifest"),
    "megatron.torch-fsdp2-finalize": ("finish_grad_sync",),
    "megatron.train-reentry": ("train_step",),
}
"""By patch, targets that it is only called by, whatever they do."""


def quietly(function, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is not installed, and of ranks that nothing is known of
        return function(*args)


def sites():
    """Return (patch, site, module, verdict) of the sites that are in this Megatron."""
    found = []
    for patch in PATCHES:
        for site in patch.sites:
            if patch.family == "megatron" and site.module.startswith(("megatron.core", "megatron.training")):
                try:
                    module = quietly(importlib.import_module, site.module)
                except ImportError:
                    continue
                found.append((patch, site, module, quietly(site.diagnose, module)))
    return found


@needs_megatron
def test_harmless_edits_are_not_refused():
    made, refused = 0, []
    for patch, site, module, before in sites():
        assert before.kind is not UNKNOWN, (patch.name, before)  # edits of it would go unnoticed
        for path in site.replace if before.kind is not ABSENT else ():
            for edit in HARMLESS:
                with edited(module, path, edit) as changed:
                    if not changed:
                        continue
                    made += 1
                    after = quietly(site.diagnose, module)
                    if after.kind is not before.kind:
                        refused.append(f"{patch.name}, {path}, {edit.__name__}: {after}")
    print(f"{len(refused)} of {made} refused:", *refused)
    assert made > 100
    assert not refused, "\n".join(refused)


@needs_megatron
def test_a_target_with_another_body_is_refused():
    missed = []
    for patch, site, module, before in sites():
        for path in site.replace if before.kind is NEEDED else ():
            if path.rpartition(".")[2] not in BODY_DOES_NOT_MATTER.get(patch.name, ()):
                for edit in (empty, another_body):
                    with edited(module, path, edit) as changed:
                        if not changed or quietly(site.diagnose, module).kind is not UNKNOWN:
                            missed.append(f"{patch.name}, {path}, {edit.__name__}")
    assert not missed, "\n".join(missed)


@needs_megatron
def test_names_that_a_diagnosis_asks_for_are_missed():
    tried, unseen = 0, []
    for patch, site, module, before in sites():
        for change, renamed, is_missing in asked_for(site, module) if before.kind is NEEDED else ():
            with renamed:
                if is_missing():
                    tried += 1
                    if (after := quietly(site.diagnose, module)).kind is not UNKNOWN:
                        unseen.append(f"{patch.name}, {change}: {after}")
    assert tried > 50
    assert not unseen, "\n".join(unseen)


@pytest.mark.parametrize("name", HARMFUL)
def test_harmful_edits_are_refused(name):
    of_patch = [(site, module, before.kind) for patch, site, module, before in sites() if patch.name == name]
    if not any(kind is NEEDED for *_, kind in of_patch):
        pytest.skip("this Megatron does not need the patch")
    not_made, missed = [], []
    for home, path, edit in HARMFUL[name]:
        home = importlib.import_module(home)
        if there := responsible(of_patch, find(home, path)):
            with edited(home, path, edit) as changed:
                if not changed:
                    not_made.append(f"{path}, {edit.__name__}")
                elif not any(quietly(site.diagnose, module).kind is UNKNOWN for site, module in there):
                    missed.append(f"{path}, {edit.__name__}")
    assert not not_made
    assert not missed


def responsible(of_patch, function):
    """Return the needed sites, with their modules, that replace a function; all if no site replaces it."""
    own = [one for one in of_patch if any(find(one[1], path) is function for path in one[0].replace)]
    return [(site, module) for site, module, kind in own or of_patch if kind is NEEDED]
