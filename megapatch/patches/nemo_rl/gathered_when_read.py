"""A refit that reads local shards of parameters reads those of the last optimizer step.

Symptom   with the distributed optimizer and overlap_param_gather, each data-parallel rank has only its own shard
          of a step's parameters until the next forward pass. nccl_reshard_refit() sends the feed-forward weights,
          those of experts too, as they are: with two ranks generation gets half of them one step old, silently.
Upstream  main at 7ea279abf, where the refit is new; NVIDIA-NeMo/RL#4086 names the defect for every refit path.
          All others read through Megatron-Bridge's exporter, or a state dict: megatron.gathered-when-read.
Seam      the worker's nccl_reshard_refit(), which every training rank runs. It sends views of the parameters that
          were made once, before training.
Limits    none known.
Numbers   generation gets the weights that were trained.
Cost      the gather that the next forward pass would make, which then makes none.
"""

from __future__ import annotations

from ...patch import Patch
from .._readers import Reader, ReadingSite
from ._workers import MODULE, WORKER, before_split_step

REFIT = Reader(
    f"{WORKER}.nccl_reshard_refit", "self.model", reads=("hf_to_local_param_map",), optional=before_split_step
)

PATCH = Patch(
    name="nemo_rl.gathered-when-read",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/RL/pull/4086",
    changes_numbers=True,
    sites=(ReadingSite(MODULE, REFIT),),
)
