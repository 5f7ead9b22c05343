"""AReaL's weight updates, exports and checkpoints hold the parameters of the last optimizer step.

Symptom   with overlap_param_gather (ddp.overlap_param_gather, which AReaL passes on to Megatron), what the
          rollout engines get after a step, by broadcast or from disk, and what a checkpoint holds, is a mixture
          of new and old parameters, silently: a data-parallel rank reads what it holds, its own shard beside
          those of others, which are one step old.
Upstream  not reported; in 1.0.4. Megatron's own train() gathers before a save.
Seam      class attributes, which all ranks call: MegatronEngine._update_weights_from_distributed() and
          _save_model_to_hf(), and MegatronCheckpointManager.save_checkpoint(), which reads unwrapped models. They
          gather before they begin. Megatron-Bridge's and mbridge's exporters, which the first two may use, gather
          by megatron.gathered-when-read.
Limits    a model in memory that torch_memory_saver has paused cannot be read: AReaL loads it first, as before.
Numbers   change in what is sampled and saved only: to those of a run without overlap_param_gather, to the last
          bit.
Cost      no gather in addition: the forward pass after a read finds nothing left to gather.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...patch import NEEDED, Patch, Site, Verdict
from .._gathered import diagnose_reads, gathered_before_call

ENGINE_MODULE = "areal.engine.megatron_engine"
UPDATE = "MegatronEngine._update_weights_from_distributed"
EXPORT = "MegatronEngine._save_model_to_hf"
MANAGER_MODULE = "areal.engine.megatron_utils.checkpointer"
SAVE = "MegatronCheckpointManager.save_checkpoint"


def diagnose_engine(module: ModuleType) -> Verdict:
    update = diagnose_reads(UPDATE, "pause_generation", module)
    return update if update.kind is not NEEDED else diagnose_reads(EXPORT, "model", module)


def diagnose_save(module: ModuleType) -> Verdict:
    return diagnose_reads(SAVE, "generate_state_dict", module)


def gather_first(reader: Callable[..., Any]) -> Callable[..., Any]:
    return gathered_before_call(reader, lambda self, *args, **kwargs: list(self.model))


PATCH = Patch(
    name="areal.gathered-when-read",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/RL/pull/4086",
    sites=(
        Site(
            module=ENGINE_MODULE,
            diagnose=diagnose_engine,
            replace={UPDATE: gather_first, EXPORT: gather_first},
        ),
        Site(module=MANAGER_MODULE, diagnose=diagnose_save, replace={SAVE: gather_first}),
    ),
    changes_numbers=True,
)
