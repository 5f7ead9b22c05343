"""verl's pipeline stages draw different random numbers.

Symptom   set_random_seed() gives every pipeline stage the same seed, so dropout, the initial weights of LoRA
          adapters and value heads, and other noise silently repeat from stage to stage.
Upstream  in 0.6.1 to 0.9.1 and on main. Megatron-LM's own initialize._set_random_seed() adds 100 for each stage;
          SkyRL had the same defect until NovaSky-AI/SkyRL#1212.
Seam      the module's function, and with it the name under which the engine imports it. The seed passed on is
          higher by 100 for each stage. Engines in one process, such as actor and reference, seed again: calls do
          not add up.
Limits    before model parallel is initialised the stage is unknown, and the seed is passed on as it is; verl
          initialises it first. Data-parallel ranks share a seed, as in verl. Not the copies of the function in
          the older megatron_workers of 0.6.1 and 0.7.1.
Numbers   change on every pipeline stage but the first.
Cost      nothing but the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...patch import ABSENT, FIXED, NEEDED, Patch, Site, Verdict
from .._diagnosis import lacking, missing_names, missing_parameters
from .._pipeline_seed import STAGE, seed_offset

MODULE = "verl.workers.engine.megatron.utils"
SEED = "set_random_seed"


def diagnose(module: ModuleType) -> Verdict:
    """Read the real function: running it would seed this process."""
    if not hasattr(module, SEED):
        return Verdict(ABSENT, f"this version has no {SEED}()")
    path = f"{module.__name__}:{SEED}"
    if not missing_names(path, STAGE):
        return Verdict(FIXED, "the seed depends on the pipeline stage")
    missing = [*missing_parameters(path, "seed"), *missing_names(path, "model_parallel_cuda_manual_seed")]
    return lacking(missing) if missing else Verdict(NEEDED, "all pipeline stages have the same seed")


def offset_seed_by_stage(set_random_seed: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(set_random_seed)
    def patched_set_random_seed(seed: int, *args: Any, **kwargs: Any) -> Any:
        return set_random_seed(seed + seed_offset(), *args, **kwargs)

    return patched_set_random_seed


PATCH = Patch(
    name="verl.pipeline-seed",
    doc=__doc__,
    upstream="https://github.com/NovaSky-AI/SkyRL/pull/1212",
    sites=(Site(module=MODULE, diagnose=diagnose, replace={SEED: offset_seed_by_stage}),),
    changes_numbers=True,
)
