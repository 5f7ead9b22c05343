"""Checks of what a pump is made of."""

from __future__ import annotations

import operator
from typing import Any

from ..errors import ConfigError, MisuseError
from ._config import StreamingConfig


def capacity_of(buffer: Any, config: StreamingConfig) -> int | None:
    """Return how many prompt groups the buffer holds, if it says so."""
    capacity = getattr(buffer, "max_prompt_groups", None)
    if not isinstance(capacity, int):  # a Ray actor's handle, or a proxy, has methods alone
        return None
    if capacity < (needed := config.target_prompt_groups_per_step):
        raise ConfigError("max_prompt_groups", capacity, f"target_prompt_groups_per_step ({needed}) or more")
    return capacity


def methods_of(protocol: type) -> list[str]:
    """Return the names of a protocol's methods."""
    return [name for name in vars(protocol) if not name.startswith("_")]


def require(role: str, given: Any, *names: str) -> None:
    """Raise MisuseError unless this part has methods of these names."""
    if missing := [f"{name}()" for name in names if not hasattr(given, name)]:
        raise MisuseError(f"the {role}, a {type(given).__name__}, has no {', '.join(missing)}")


def whole_version(version: Any) -> int:
    """Return the version as a plain int, or raise MisuseError."""
    try:
        whole = int(operator.index(version))
    except TypeError:
        whole = -1
    if whole < 0:
        raise MisuseError(f"version is {version!r}; it has to be a whole number, 0 or more")
    return whole
