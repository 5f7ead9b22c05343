"""A refit that reads local shards of parameters reads those of the last optimizer step.

Symptom   with the distributed optimizer and overlap_param_gather, a refit by nccl_reshard_refit() after a step
          sends feed-forward weights, those of experts too, of which each data-parallel rank has only its own shard
          from that step: with two ranks half of what generation gets of them is a step old, silently.
Upstream  main at 7ea279abf, where the refit is new; NVIDIA-NeMo/RL#4086 names the defect for every refit path.
          All others read through Megatron-Bridge's exporter, or a state dict: megatron.gathered-when-read.
Seam      the worker's nccl_reshard_refit(), which every training rank runs. It sends views of the parameters that
          were made once, before training.
Limits    none known.
Numbers   generation gets the weights that were trained.
Cost      the gather that the next forward pass would make, which then makes none.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...patch import ABSENT, FIXED, NEEDED, Patch, Site, Verdict
from .._diagnosis import lacking, missing_attributes
from .._gathered import GATHERS, gathered_before_call
from ._workers import MODULE, WORKER, names_in, no_worker

REFIT, VIEWS = "nccl_reshard_refit", "hf_to_local_param_map"


def diagnose(module: ModuleType) -> Verdict:
    """Look for a gather in the refit's code: running it takes NCCL."""
    worker = getattr(module, WORKER, None)
    if worker is None:
        return no_worker(module)
    if REFIT not in vars(worker):
        return Verdict(ABSENT, f"this version has no {REFIT}()")
    names = names_in(worker, REFIT)
    if names & set(GATHERS):
        return Verdict(FIXED, f"{REFIT}() gathers the parameters that it sends")
    missing = [*missing_attributes(f"{MODULE}:{WORKER}", "disable_forward_pre_hook")]
    if VIEWS not in names:
        missing.append(f"attribute {VIEWS} in {WORKER}.{REFIT}")
    if missing:
        return lacking(missing)
    return Verdict(NEEDED, f"with overlap_param_gather {REFIT}() sends parameters that are not gathered")


def gather_first(nccl_reshard_refit: Callable[..., Any]) -> Callable[..., Any]:
    return gathered_before_call(nccl_reshard_refit, lambda self, *args, **kwargs: self.model)


PATCH = Patch(
    name="nemo_rl.gathered-when-read",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/RL/pull/4086",
    changes_numbers=True,
    sites=(Site(module=MODULE, diagnose=diagnose, replace={f"{WORKER}.{REFIT}": gather_first}),),
)
