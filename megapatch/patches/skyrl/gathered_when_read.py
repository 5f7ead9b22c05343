"""SkyRL's checkpoints hold the parameters of the last optimizer step.

Symptom   with overlap_param_gather (SkyRL passes it on to Megatron), a checkpoint saved after a step is a mixture
          of new and old parameters, silently: a data-parallel rank writes its local memory, its own shard beside
          those of others, which are one step old.
Upstream  not reported for SkyRL; in all releases of skyrl-train and skyrl, and on main. Megatron's own train()
          gathers before a save.
Seam      MegatronStrategy.save_checkpoint(), which all ranks call, gathers before it begins. It asks the unwrapped
          model for its state; save_hf_model() and weight syncs read through Megatron-Bridge's exporter (mbridge's
          in skyrl-train 0.2.0), which gathers by megatron.gathered-when-read.
Limits    AdapterStore, which swaps LoRA adapters, copies the buffers as they are, together with the optimizer's
          state: call `megapatch.weight_sync.gathered_parameters(model)` before swapping. Parameters that cannot be
          gathered, such as those in an offloaded buffer, save_checkpoint() refuses, too.
Numbers   change in checkpoints only: to those of a run without overlap_param_gather, to the last bit.
Cost      no gather in addition with megatron.gathered-when-read: the forward pass after a save finds nothing left
          to gather.
"""

from __future__ import annotations

from ...patch import Patch
from .._readers import Reader, ReadingSite

SAVE = Reader("MegatronStrategy.save_checkpoint", "model.actor_module", reads=("sharded_state_dict",))

PATCH = Patch(
    name="skyrl.gathered-when-read",
    doc=__doc__,
    upstream=None,
    sites=tuple(
        ReadingSite(f"{package}.distributed.megatron.megatron_strategy", SAVE)
        for package in ("skyrl_train", "skyrl.backends.skyrl_train")
    ),
    changes_numbers=True,
)
