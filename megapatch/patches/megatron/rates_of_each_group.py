"""A load gives each parameter group its own learning rate, also where groups differ in nothing else.

Symptom   after a load the embedding's group has the learning rate of the matrices, or they have its, with
          --decoupled-lr or an override of max_lr; silently. Without the distributed optimizer a load may end with
          "a parameter group that doesn't match the size of optimizer's group" instead.
Upstream  NVIDIA/Megatron-LM#4705, fixed in 0.19. A saved group is found by its multipliers and whether it is of
          experts. Several with the same ones count as one, the last. From 0.16 on a decoupled rate is not among
          them.
Seam      load_state_dict() of an optimizer. Where saved groups count as one, groups are also told apart by their
          rates while it runs, as in 0.19.
Limits    where groups differ in nothing but rates, and the run's are not the checkpoint's, it cannot be said which
          group is which: a warning says so, and Megatron loads as before.
Numbers   change where groups counted as one, to those of a run that was not interrupted.
Cost      nothing in a step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._python.dotted import temporarily_set
from ...patch import FIXED, NEEDED, Patch, Site, Verdict
from .._diagnosis import before_release, gone

MODULES = {
    "megatron.core.optimizer.optimizer": ("FP32Optimizer", "Float16OptimizerWithFloat16Params"),
    "megatron.core.optimizer.distrib_optimizer": ("DistributedOptimizer",),
}
KEYS = "param_group_identifier_keys"


def diagnose(module: ModuleType) -> Verdict:
    """Look at the settings by which a load of this module tells groups apart."""
    keys = getattr(module, KEYS, None)
    if keys is None:
        return gone(KEYS, module, before_release("megatron-core", "0.14"))
    if "max_lr" in keys:
        return Verdict(FIXED, "a load tells groups apart by their rates")
    return Verdict(NEEDED, "a load takes groups that differ in nothing but their rates for one")


def tell_apart(load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    module = sys.modules[load_state_dict.__module__]

    @functools.wraps(load_state_dict)
    def patched_load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        from ._rates_of_groups import keys_with_rates

        keys = keys_with_rates(getattr(module, KEYS), getattr(self.optimizer, "param_groups", ()), state_dict)
        with temporarily_set(module, **{KEYS: keys}):
            return load_state_dict(self, state_dict, *args, **kwargs)

    return patched_load_state_dict


PATCH = Patch(
    name="megatron.rates-of-each-group",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/4705",
    changes_numbers=True,
    sites=tuple(
        Site(module, diagnose, replace={f"{kind}.load_state_dict": tell_apart for kind in kinds})
        for module, kinds in MODULES.items()
    ),
)
