"""Parameter groups in the state of Megatron's optimizers, and what a load tells them apart by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

GROUPS = "param_groups"
TOLD_APART_BY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "default_config")
"""Settings by which groups differ, other than their rates."""


def parts_with_groups(state: dict[str, Any]) -> list[str]:
    """Return the keys of the parts of an optimizer's state in which its groups are, if it has them in a part."""
    parts = {key: state.get(key) for key in ("optimizer", "optimizer_state_dict")}
    return [key for key, part in parts.items() if isinstance(part, dict) and GROUPS in part]


def identity(group: dict[str, Any], settings: Iterable[str]) -> tuple[Any, ...]:
    """Return what a group has for these settings; NeMo's names begin with `pre_`."""
    return tuple(group.get(name, group.get(f"pre_{name}")) for name in settings)
