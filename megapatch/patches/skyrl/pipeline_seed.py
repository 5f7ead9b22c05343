"""SkyRL's pipeline stages draw different random numbers.

Symptom   MegatronStrategy.set_seed() gives every pipeline stage the same seed, so dropout and other noise
          silently repeat from stage to stage.
Upstream  fixed by NovaSky-AI/SkyRL#1212, in all releases of skyrl; skyrl-train 0.2.0 to 0.3.1 and checkouts up to
          2026-03-01 have the defect.
Seam      the class attribute. The seed passed on is higher by 100 for each stage, as in Megatron-LM's own
          _set_random_seed and now upstream. self.seed stays, and calls do not add up.
Limits    before model parallel is initialised the stage is unknown: the seed is passed on as it is, where
          upstream's raises. Data-parallel ranks share a seed, as in SkyRL.
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

MODULES = (
    "skyrl_train.distributed.megatron.megatron_strategy",
    "skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy",
)
STRATEGY = "MegatronStrategy"


def diagnose(module: ModuleType) -> Verdict:
    """Read the real methods: running them would seed this process."""
    if not hasattr(module, STRATEGY):
        return Verdict(ABSENT, f"this version has no {STRATEGY}")
    set_seed, setup = (f"{module.__name__}:{STRATEGY}.{name}" for name in ("set_seed", "setup_distributed"))
    if not missing_names(set_seed, STAGE) or not missing_names(setup, STAGE):
        return Verdict(FIXED, "the seed depends on the pipeline stage")
    missing = [
        *missing_parameters(set_seed, "seed"),
        *missing_names(set_seed, "manual_seed"),
        *missing_names(setup, "set_seed", "initialize_model_parallel"),
    ]
    return lacking(missing) if missing else Verdict(NEEDED, "all pipeline stages have the same seed")


def offset_seed_by_stage(set_seed: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(set_seed)
    def patched_set_seed(self: Any, seed: int, *args: Any, **kwargs: Any) -> None:
        set_seed(self, seed + seed_offset(), *args, **kwargs)

    return patched_set_seed


PATCH = Patch(
    name="skyrl.pipeline-seed",
    doc=__doc__,
    upstream="https://github.com/NovaSky-AI/SkyRL/pull/1212",
    sites=tuple(
        Site(module=module, diagnose=diagnose, replace={f"{STRATEGY}.set_seed": offset_seed_by_stage})
        for module in MODULES
    ),
    changes_numbers=True,
)
