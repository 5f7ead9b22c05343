"""An optimizer's state with the learning rates of its scheduler, which overrides the checkpoint's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ._param_groups import GROUPS, TOLD_APART_BY, identity, parts_with_groups

RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Settings that a group may have in place of its scheduler's."""


def with_rates_of_each(children: list[Any], state: Any) -> Any:
    """Return a copy of a chain's state: that of its only optimizer, or a list or a dictionary of several."""
    if not isinstance(state, (dict, list)):
        return state
    if len(children) == 1:
        return _with_rates_of(children[0], state)
    if len(children) != len(state):
        return state  # Megatron says what is wrong
    if isinstance(state, dict):
        order = sorted(state)
        return {key: _with_rates_of(child, state[key]) for key, child in zip(order, children, strict=True)}
    return [_with_rates_of(child, of_child) for child, of_child in zip(children, state, strict=True)]


def _with_rates_of(child: Any, state: Any) -> Any:
    if child.optimizer is None or not isinstance(state, dict):
        return state
    return _with_rates_of_groups(child.optimizer.param_groups, state)


def _with_rates_of_groups(groups: Iterable[dict[str, Any]], state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of an optimizer's state whose groups have the rates of these."""
    if GROUPS not in state:
        return {**state, **{key: _with_rates_of_groups(groups, state[key]) for key in parts_with_groups(state)}}
    own = _alone(groups)
    saved = _alone(state[GROUPS])
    return {**state, GROUPS: [_with_rates(group, own, saved) for group in state[GROUPS]]}


def _with_rates(group: dict[str, Any], own: dict[Any, Any], saved: dict[Any, Any]) -> dict[str, Any]:
    key = identity(group, TOLD_APART_BY)
    if own.get(key) is None or saved.get(key) is None:
        return group
    rates = {name: own[key][name] for name in RATES if name in own[key]}
    return {**{name: value for name, value in group.items() if name not in RATES}, **rates}


def _alone(groups: Iterable[dict[str, Any]]) -> dict[Any, Any]:
    """Return the groups by identity; None where several have the same."""
    found: dict[Any, Any] = {}
    for group in groups:
        key = identity(group, TOLD_APART_BY)
        found[key] = None if key in found else group
    return found
