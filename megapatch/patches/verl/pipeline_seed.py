"""verl's pipeline stages draw different random numbers.

Symptom   set_random_seed() gives every pipeline stage the same seed, so dropout, the initial weights of LoRA
          adapters and value heads, and other noise silently repeat from stage to stage.
Upstream  not reported; in 0.6.1 to 0.9.1 and on main. Megatron-LM's own initialize._set_random_seed() adds 100 for
          each stage; SkyRL had the same defect until NovaSky-AI/SkyRL#1212.
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

from types import ModuleType

from ...patch import Patch, Site, Verdict
from .._diagnosis import unmet
from .._pipeline_seed import diagnose_seed, offset_seed_by_stage

MODULE = "verl.workers.engine.megatron.utils"
SEED = "set_random_seed"


def diagnose(module: ModuleType) -> Verdict:
    """Read the real function: running it would seed this process."""
    path = f"{module.__name__}:{SEED}"
    missing = [*unmet.parameters(path, "seed"), *unmet.names(path, "model_parallel_cuda_manual_seed")]
    return diagnose_seed((path,), missing)


PATCH = Patch(
    name="verl.pipeline-seed",
    doc=__doc__,
    upstream=None,
    sites=(Site(MODULE, diagnose, replace={SEED: offset_seed_by_stage}),),
    changes_numbers=True,
)
