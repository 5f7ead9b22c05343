"""Learning rates in an optimizer's state: those of a scheduler that overrides, and by which groups differ."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from ..._version import see
from ._param_groups import GROUPS, TOLD_APART_BY, identity, parts_with_groups

RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Settings that a group may have in place of its scheduler's."""
MORE = ("default_config", "max_lr", "min_lr")
"""Settings by which groups differ, too: whether a group has the rates of most, and its rates."""


# ------------------------------------------------------------------------ a scheduler that overrides


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


# ------------------------------------------------------------------------ groups that differ in rates
def keys_with_rates(keys: tuple[str, ...], own: Any, state: Any) -> tuple[str, ...]:
    """Return the fewest settings, these and more, that tell saved groups apart and find each of the run's."""
    saved = _saved(state)
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


def _saved(state: Any) -> Any:
    """Return the groups in an optimizer's state: FP32Optimizer has them in no part of it."""
    if not isinstance(state, dict):
        return ()
    if GROUPS in state:
        return state[GROUPS]
    return next((state[key][GROUPS] for key in parts_with_groups(state)), ())


def _identities(groups: Iterable[dict[str, Any]], names: tuple[str, ...]) -> set[tuple[Any, ...]]:
    """Return what these settings tell apart."""
    return {identity(group, names) for group in groups}
