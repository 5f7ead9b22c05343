"""verl's checkpoints, exports of shards and copies hold the parameters of the last optimizer step.

Symptom   with overlap_param_gather (verl passes it on to Megatron, in override_ddp_config and
          override_optimizer_config), a checkpoint, an export of shards (delta weight syncs) or a copy in the CPU's
          memory that is made after a step is a mixture of new and old parameters, silently: a data-parallel rank
          reads its local memory, its own shard beside those of others, which are one step old.
Upstream  not reported for verl; in 0.7.1 to 0.9.1 and on main. Megatron's own train() gathers before a save.
Seam      MegatronCheckpointManager.save_checkpoint(), copy_megatron_model_to_cpu() and
          MegatronEngine.get_per_tensor_param_shard() read unwrapped models and buffers. The first two gather
          before they begin; the last returns a generator, which gathers at its first `next`. All ranks call each.
          get_per_tensor_param() and exports to Hugging Face's format read through Megatron-Bridge's exporter (or
          mbridge's), which gathers by megatron.gathered-when-read.
Limits    from a model that is offloaded since the step nothing can be gathered: there a copy is refused, with a
          message that says what to do. Checkpoints and exports load the model first.
Numbers   change in checkpoints, shards and copies only: to those of a run without overlap_param_gather, to the
          last bit.
Cost      no gather in addition with megatron.gathered-when-read: the forward pass after a read finds nothing left
          to gather.
"""

from __future__ import annotations

from ...patch import Patch
from .._diagnosis import before_release
from .._readers import Reader, ReadingSite

PATCH = Patch(
    name="verl.gathered-when-read",
    doc=__doc__,
    upstream=None,
    sites=(
        ReadingSite(
            "verl.utils.checkpoint.megatron_checkpoint_manager",
            Reader("MegatronCheckpointManager.save_checkpoint", "self.model", reads=("checkpoint_config",)),
        ),
        ReadingSite(
            "verl.workers.engine.megatron.transformer_impl",
            Reader(
                "MegatronEngine.get_per_tensor_param_shard",
                "self.module",
                reads=("module",),
                stream=True,
                optional=before_release("verl", "0.9"),
            ),
        ),
        ReadingSite(
            "verl.utils.megatron_utils",
            Reader(
                "copy_megatron_model_to_cpu", "models", reads=("buffers",), optional=before_release("verl", "0.7")
            ),
        ),
    ),
    changes_numbers=True,
)
