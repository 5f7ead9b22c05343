"""AReaL's weight updates, exports and checkpoints hold the parameters of the last optimizer step.

Symptom   with overlap_param_gather (ddp.overlap_param_gather, which AReaL passes on to Megatron), rollout
          engines and checkpoints get a mixture of new and old parameters after a step, silently: a data-parallel
          rank reads its local memory, its own shard beside those of others, which are one step old.
Upstream  not reported; in 1.0.4. Megatron's own train() gathers before a save.
Seam      class attributes, which all ranks call: MegatronEngine._update_weights_from_distributed() and
          _save_model_to_hf(), and MegatronCheckpointManager.save_checkpoint(), which reads unwrapped models. They
          gather before they begin. Megatron-Bridge's and mbridge's exporters, which the first two may use, gather
          by megatron.gathered-when-read.
Limits    a model in memory that torch_memory_saver has paused cannot be read: AReaL loads it first, as before.
Numbers   change in samples and checkpoints only: to those of a run without overlap_param_gather, to the last
          bit.
Cost      no gather in addition: the forward pass after a read finds nothing left to gather.
"""

from __future__ import annotations

from ...patch import Patch
from .._readers import Reader, ReadingSite

PATCH = Patch(
    name="areal.gathered-when-read",
    doc=__doc__,
    upstream=None,
    sites=(
        ReadingSite(
            "areal.engine.megatron_engine",
            Reader("MegatronEngine._update_weights_from_distributed", "self.model", reads=("pause_generation",)),
            Reader("MegatronEngine._save_model_to_hf", "self.model", reads=("model",)),
        ),
        ReadingSite(
            "areal.engine.megatron_utils.checkpointer",
            Reader("MegatronCheckpointManager.save_checkpoint", "self.model", reads=("generate_state_dict",)),
        ),
    ),
    changes_numbers=True,
)
