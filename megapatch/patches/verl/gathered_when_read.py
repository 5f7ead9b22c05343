"""verl's checkpoints, exports of shards and copies hold the parameters of the last optimizer step.

Symptom   with overlap_param_gather (verl passes it on to Megatron, in override_ddp_config and
          override_optimizer_config), a checkpoint, an export of shards (delta weight syncs) or a copy in the CPU's
          memory that is made after a step is a mixture of new and old parameters, silently: a data-parallel rank
          reads what it holds, its own shard beside those of others, which are one step old.
Upstream  in 0.7.1 to 0.9.1 and on main. Megatron's own train() gathers before a save.
Seam      MegatronCheckpointManager.save_checkpoint(), copy_megatron_model_to_cpu() and
          MegatronEngine.get_per_tensor_param_shard() read unwrapped models and buffers, out of the reach of
          megatron.gathered-when-read. The first two gather before they begin; the last returns a generator, which
          gathers at its first `next`. All ranks call each. get_per_tensor_param() and exports to Hugging Face's
          format read through Megatron-Bridge's exporter (or mbridge's), which that patch makes gather.
Limits    from a model that is offloaded since the step nothing can be gathered: there a copy is refused, with a
          message that says what to do. Checkpoints and exports load the model first.
Numbers   change in checkpoints, shards and copies only: to those of a run without overlap_param_gather, to the
          last bit.
Cost      no gather in addition with megatron.gathered-when-read: the forward pass after a read finds nothing left
          to gather.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...patch import Patch, Site, Verdict
from .._gathered import diagnose_reads, gathered_at_first_next, gathered_before_call

ENGINE_MODULE = "verl.workers.engine.megatron.transformer_impl"
SHARDS = "MegatronEngine.get_per_tensor_param_shard"
MANAGER_MODULE = "verl.utils.checkpoint.megatron_checkpoint_manager"
SAVE = "MegatronCheckpointManager.save_checkpoint"
COPY_MODULE = "verl.utils.megatron_utils"
COPY = "copy_megatron_model_to_cpu"


def diagnose_save(module: ModuleType) -> Verdict:
    return diagnose_reads(SAVE, "checkpoint_config", module)


def diagnose_shards(module: ModuleType) -> Verdict:
    return diagnose_reads(SHARDS, "module", module)


def diagnose_copy(module: ModuleType) -> Verdict:
    return diagnose_reads(COPY, "buffers", module)


def gather_before_save(save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    return gathered_before_call(save_checkpoint, lambda self, *args, **kwargs: list(self.model))


def gather_before_copy(copy: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(copy)

    def model_of(*args: Any, **kwargs: Any) -> Any:
        return list(signature.bind(*args, **kwargs).arguments["models"])

    return gathered_before_call(copy, model_of)


def gather_at_first_shard(get_per_tensor_param_shard: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_per_tensor_param_shard)
    def patched_get_per_tensor_param_shard(self: Any, *args: Any, **kwargs: Any) -> Any:
        shards, *others = get_per_tensor_param_shard(self, *args, **kwargs)
        return gathered_at_first_next(lambda: shards, lambda: list(self.module))(), *others

    return patched_get_per_tensor_param_shard


PATCH = Patch(
    name="verl.gathered-when-read",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/RL/pull/4086",
    sites=(
        Site(module=MANAGER_MODULE, diagnose=diagnose_save, replace={SAVE: gather_before_save}),
        Site(module=ENGINE_MODULE, diagnose=diagnose_shards, replace={SHARDS: gather_at_first_shard}),
        Site(module=COPY_MODULE, diagnose=diagnose_copy, replace={COPY: gather_before_copy}),
    ),
    changes_numbers=True,
)
