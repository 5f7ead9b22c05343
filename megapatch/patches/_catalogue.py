"""The names of each family's patches, and the modules that they watch, as long as they are not imported."""

from __future__ import annotations

import importlib

from ..patch import Patch

# A line for each patch, in the order of the reports, with the modules of its sites. tests/pages writes it.
_WATCHED = """\
areal.aux-loss-scale areal.engine.megatron_engine
areal.eval-loss areal.engine.megatron_engine
areal.gathered-when-read areal.engine.megatron_engine areal.engine.megatron_utils.checkpointer
areal.load-optimizer-state areal.engine.megatron_utils.checkpointer
areal.pipeline-seed areal.engine.megatron_engine
areal.weight-sync-resume areal.engine.megatron_engine
megatron.asked-step-loaded megatron.training.checkpointing megatron.bridge.training.checkpointing
megatron.aux-loss-over-context-parallel megatron.core.pipeline_parallel
megatron.dropped-models-freed megatron.core.distributed.distributed_data_parallel
megatron.expert-streams-loaded megatron.core.tensor_parallel.random
megatron.finetune-for-one-load megatron.training.checkpointing megatron.bridge.training.checkpointing
    megatron.bridge.training.setup
megatron.forward-pre-hook megatron.core.distributed.distributed_data_parallel
megatron.fresh-metadata megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader
    nvidia_resiliency_ext.checkpointing.async_ckpt.cached_metadata_filesystem_reader
megatron.fresh-train-state megatron.bridge.training.checkpointing
megatron.fully-reshardable-states megatron.core.optimizer.distrib_optimizer
megatron.gathered-when-read megatron.core.optimizer.distrib_optimizer megatron.core.distributed
    megatron.training.checkpointing megatron.core.transformer.module megatron.bridge.training.checkpointing
    megatron.core.resharding.refit megatron.bridge.models.conversion.model_bridge
    megatron.bridge.models.conversion.peft_bridge megatron.bridge.models.conversion.quant_bridge
    mbridge.core.bridge mcore_bridge.bridge.gpt_bridge mcore_bridge.tuners.lora
megatron.grad-ready-window megatron.core
megatron.groups-destroyed megatron.core.parallel_state
megatron.layer-wise-gathers megatron.core.distributed.param_and_grad_buffer
megatron.load-offloaded-state megatron.core.optimizer.distrib_optimizer
megatron.main-params-after-load megatron.core.optimizer megatron.core.transformer.module
    megatron.core.dist_checkpointing.serialization megatron.core.distributed.data_parallel_base
megatron.masks-for-training megatron.core.transformer.utils
megatron.nested-no-sync megatron.core.distributed.distributed_data_parallel
megatron.override-after-load megatron.core.optimizer megatron.core.optimizer_param_scheduler
megatron.own-save-results megatron.core.dist_checkpointing.strategies.filesystem_async
    nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async
megatron.parameters-without-gradients megatron.core.distributed
megatron.prepare-grads-once megatron.core.optimizer
megatron.rates-of-each-group megatron.core.optimizer.optimizer megatron.core.optimizer.distrib_optimizer
megatron.recovery-before-pretrained megatron.training.checkpointing megatron.bridge.training.checkpointing
    megatron.bridge.training.setup
megatron.refit-plan-of-its-model megatron.core.resharding.refit
megatron.reload-offloaded-params megatron.core.optimizer.distrib_optimizer
megatron.rerun-state-dict megatron.core.rerun_state_machine megatron.core.dist_checkpointing.validation
megatron.rerun-transient-fault megatron.core.rerun_state_machine
megatron.save-fails-everywhere megatron.core.dist_checkpointing.strategies.state_dict_saver
    nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver megatron.core.dist_checkpointing.serialization
    megatron.core.dist_checkpointing.validation megatron.core.dist_checkpointing.strategies.async_utils
    nvidia_resiliency_ext.checkpointing.async_ckpt.core
megatron.save-plan-cache megatron.core.dist_checkpointing.strategies.torch
    megatron.core.dist_checkpointing.strategies.fully_parallel
megatron.saves-of-one-step megatron.core.dist_checkpointing.strategies.async_utils
    nvidia_resiliency_ext.checkpointing.async_ckpt.core
megatron.scheduler-after-load megatron.core.optimizer_param_scheduler
megatron.strict-loads-with-new-torch megatron.core.dist_checkpointing.strategies.torch
megatron.torch-fsdp2-finalize megatron.core.distributed
megatron.tracked-checkpoint-stays megatron.training.checkpointing megatron.bridge.training.checkpointing
megatron.train-reentry megatron.training.training megatron.bridge.training.train
megatron.zero-tokens megatron.core.pipeline_parallel
ms_swift.overflow-is-skipped swift.megatron.utils.megatron_lm_utils swift.megatron.trainers.base
ms_swift.train-reentry swift.megatron.trainers.base
nemo_rl.abort-resets-rerun nemo_rl.models.policy.workers.megatron_policy_worker
nemo_rl.forward-pre-hook-after-split nemo_rl.models.policy.workers.megatron_policy_worker
nemo_rl.gathered-when-read nemo_rl.models.policy.workers.megatron_policy_worker
nemo_rl.hooks-without-overlap megatron.bridge.training.setup nemo.tron.setup
nemo_rl.open-step-guard nemo_rl.models.policy.workers.megatron_policy_worker
    nemo_rl.models.policy.workers.dtensor_policy_worker nemo_rl.models.policy.workers.dtensor_policy_worker_v2
    nemo_rl.models.policy.dtensor_policy_worker nemo_rl.models.policy.dtensor_policy_worker_v2
nemo_rl.reference-model-rollback nemo_rl.models.policy.workers.megatron_policy_worker
    nemo_rl.models.policy.workers.dtensor_policy_worker nemo_rl.models.policy.workers.dtensor_policy_worker_v2
    nemo_rl.models.policy.dtensor_policy_worker nemo_rl.models.policy.dtensor_policy_worker_v2
nemo_rl.split-train-step nemo_rl.models.policy.workers.megatron_policy_worker
    nemo_rl.models.policy.megatron_policy_worker
nemo_rl.split-train-step-dtensor nemo_rl.models.policy.workers.dtensor_policy_worker
    nemo_rl.models.policy.workers.dtensor_policy_worker_v2 nemo_rl.models.policy.dtensor_policy_worker
    nemo_rl.models.policy.dtensor_policy_worker_v2
nemo_rl.split-train-step-policy nemo_rl.models.policy.lm_policy nemo_rl.models.policy.tq_policy
    nemo_rl.data_plane.worker_mixin
nemo_rl.sync-weights-version nemo_rl.weight_sync.interfaces
nemo_rl.train-after-exception nemo_rl.models.megatron.train nemo_rl.utils.timer
roll.grad-scale roll.distributed.strategy.megatron_strategy
roll.overflow-is-skipped roll.distributed.strategy.megatron_strategy
skyrl.accumulate-forward-backward skyrl_train.workers.megatron.megatron_worker
    skyrl.backends.skyrl_train.workers.megatron.megatron_worker
skyrl.adapters-own-state skyrl.backends.skyrl_train.workers.megatron.adapter_store
skyrl.async-trainer-resume skyrl_train.fully_async_trainer skyrl.train.fully_async_trainer
skyrl.gathered-when-read skyrl_train.distributed.megatron.megatron_strategy
    skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy
skyrl.grad-scale skyrl_train.workers.megatron.megatron_model_wrapper
    skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper
skyrl.pause-rollback skyrl_train.inference_engines.inference_engine_client
    skyrl.backends.skyrl_train.inference_engines.inference_engine_client
skyrl.pipeline-seed skyrl_train.distributed.megatron.megatron_strategy
    skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy
skyrl.weight-sync-pause skyrl_train.workers.worker_dispatch skyrl.backends.skyrl_train.workers.worker_dispatch
slime.first-sync-pushes-actor slime.backends.megatron_utils.actor miles.backends.megatron_utils.actor
slime.schedule-after-load slime.backends.megatron_utils.model miles.backends.megatron_utils.model
slime.train-reentry slime.backends.megatron_utils.model miles.backends.megatron_utils.model
verl.gathered-when-read verl.utils.checkpoint.megatron_checkpoint_manager
    verl.workers.engine.megatron.transformer_impl verl.utils.megatron_utils
verl.overflow-is-skipped verl.workers.engine.megatron.transformer_impl
verl.pipeline-seed verl.workers.engine.megatron.utils
verl.schedule-after-load verl.utils.checkpoint.megatron_checkpoint_manager
verl.training-hooks verl.utils.megatron_utils
verl.weight-sync-resume verl.checkpoint_engine.base
"""


def _by_family(lines: str) -> dict[str, dict[str, tuple[str, ...]]]:
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for line in lines.replace("\n    ", " ").splitlines():
        name, *modules = line.split()
        found.setdefault(name.partition(".")[0], {})[name] = tuple(modules)
    return found


CATALOGUE = _by_family(_WATCHED)
"""By family and patch: the modules of its sites."""

RETIRED: dict[str, str] = {}
"""Patches that were removed, each with the release that has the repair. Settings still know their names."""


def of_family(family: str) -> tuple[Patch, ...]:
    """Import a family's files, of one patch each, and return the patches in order."""
    return tuple(map(of_name, CATALOGUE[family]))


def of_name(name: str) -> Patch:
    """Import a patch's file, and return the patch."""
    family, _, file = name.replace("-", "_").partition(".")
    patch: Patch = importlib.import_module(f"{__package__}.{family}.{file}").PATCH
    return patch
