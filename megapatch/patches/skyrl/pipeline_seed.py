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

from types import ModuleType

from ...patch import Patch, Site, Verdict
from .._diagnosis import unmet
from .._pipeline_seed import diagnose_seed, offset_seed_by_stage

MODULES = (
    "skyrl_train.distributed.megatron.megatron_strategy",
    "skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy",
)
STRATEGY = "MegatronStrategy"


def diagnose(module: ModuleType) -> Verdict:
    """Read the real methods: running them would seed this process."""
    set_seed, setup = (f"{module.__name__}:{STRATEGY}.{name}" for name in ("set_seed", "setup_distributed"))
    missing = [
        *unmet.parameters(set_seed, "seed"),
        *unmet.names(set_seed, "manual_seed"),
        *unmet.names(setup, "set_seed", "initialize_model_parallel"),
    ]
    return diagnose_seed((set_seed, setup), missing)


PATCH = Patch(
    name="skyrl.pipeline-seed",
    doc=__doc__,
    upstream="https://github.com/NovaSky-AI/SkyRL/pull/1212",
    sites=tuple(
        Site(module, diagnose, replace={f"{STRATEGY}.set_seed": offset_seed_by_stage}) for module in MODULES
    ),
    changes_numbers=True,
)
