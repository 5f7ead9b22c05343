"""AReaL's pipeline stages draw different random numbers.

Symptom   create_process_group() seeds Megatron's random streams alike on every pipeline stage, so dropout, and
          the initial weights of LoRA adapters and value heads, silently repeat from stage to stage.
Upstream  not reported; in 1.0.4. Megatron-LM's own initialize._set_random_seed() adds 100 for each stage; SkyRL
          had the same defect until NovaSky-AI/SkyRL#1212.
Seam      the class attribute. Where it has set up Megatron's parallel state, stages other than the first seed
          once more, higher by 100 for each stage.
Limits    AReaL seeds these streams before it knows the configured seed, with 0: that stays. Data-parallel ranks
          share a seed, as in AReaL.
Numbers   change on every pipeline stage but the first.
Cost      once a process.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...patch import Patch, Site, Verdict
from .._diagnosis import unmet
from .._pipeline_seed import diagnose_seed, seed_offset

MODULE = "areal.engine.megatron_engine"
ENGINE = "MegatronEngine"
CREATE = "create_process_group"


def diagnose(module: ModuleType) -> Verdict:
    """Read the real method: running it makes process groups."""
    path = f"{module.__name__}:{ENGINE}.{CREATE}"
    missing = [
        *unmet.names(path, "model_parallel_cuda_manual_seed", "seed", "own_global_group"),
        *unmet.attributes(f"{module.__name__}:", "tensor_parallel"),
    ]
    return diagnose_seed((path,), missing)


def seed_by_stage(create_process_group: Callable[..., Any]) -> Callable[..., Any]:
    module = sys.modules[create_process_group.__module__]

    @functools.wraps(create_process_group)
    def patched_create_process_group(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.own_global_group
        result = create_process_group(self, *args, **kwargs)
        offset = seed_offset()
        if offset and self.own_global_group and not before:  # it has seeded
            module.tensor_parallel.model_parallel_cuda_manual_seed(self.seed + offset)
        return result

    return patched_create_process_group


PATCH = Patch(
    name="areal.pipeline-seed",
    doc=__doc__,
    upstream=None,
    sites=(Site(MODULE, diagnose, replace={f"{ENGINE}.{CREATE}": seed_by_stage}),),
    changes_numbers=True,
)
