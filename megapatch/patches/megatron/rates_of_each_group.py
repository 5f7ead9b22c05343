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
import logging
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from ..._python.dotted import temporarily_set
from ..._version import see
from ...patch import FIXED, NEEDED, Patch, Site, Verdict
from .._diagnosis import before_release, gone
from ._param_groups import GROUPS, identity, parts_with_groups

MODULES = {
    "megatron.core.optimizer.optimizer": ("FP32Optimizer", "Float16OptimizerWithFloat16Params"),
    "megatron.core.optimizer.distrib_optimizer": ("DistributedOptimizer",),
}
KEYS = "param_group_identifier_keys"
MORE = ("default_config", "max_lr", "min_lr")
"""Settings by which groups differ, too: whether a group has the rates of most, and its rates."""


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
        own = getattr(self.optimizer, GROUPS, ())
        with temporarily_set(module, **{KEYS: _keys(getattr(module, KEYS), own, _saved(state_dict))}):
            return load_state_dict(self, state_dict, *args, **kwargs)

    return patched_load_state_dict


def _saved(state: Any) -> Any:
    """Return the groups in an optimizer's state: FP32Optimizer has them in no part of it."""
    if not isinstance(state, dict):
        return ()
    if GROUPS in state:
        return state[GROUPS]
    return next((state[key][GROUPS] for key in parts_with_groups(state)), ())


def _keys(keys: tuple[str, ...], own: Any, saved: Any) -> tuple[str, ...]:
    """Return the fewest settings, these and more, that tell saved groups apart and find each of the run's."""
    more = tuple(name for name in MORE if all(name in group for group in (*own, *saved)))
    kinds = len(_identities(saved, keys + more))
    if kinds == len(_identities(saved, keys)):
        return keys
    for several in (keys + more[:1], keys + more):
        identities = _identities(saved, several)
        if len(identities) == kinds and _identities(own, several) <= identities:
            return several
    logging.getLogger("megapatch").warning(
        "megatron.rates-of-each-group: groups of this checkpoint differ in nothing but their learning rates, and "
        "the run's groups have other ones: expected the same, to find which group is which; found %s and %s. Set "
        "max_lr and min_lr of optimizer.param_groups after the load" + see("rates"),
        *(sorted({group["max_lr"] for group in groups}) for groups in (saved, own)),
    )
    return keys


def _identities(groups: Iterable[dict[str, Any]], names: tuple[str, ...]) -> set[tuple[Any, ...]]:
    """Return what these settings tell apart."""
    return {identity(group, names) for group in groups}


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
