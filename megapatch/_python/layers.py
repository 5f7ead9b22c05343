"""The layers of a function that others have wrapped, by ``__wrapped__``.

Objects of others may do anything when they are looked at: attributes that raise count as missing, and a chain that
never ends is left after a thousand layers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

MARK = "__megapatch__"
"""Attribute that the installer sets on every function it installs: the name of the patch."""
HOLDER = "__megapatch_holder__"
"""Attribute of a function of megapatch's that stands on top of a method for a while: who has put it there."""

_MOST_LAYERS = 1000
HIDDEN = "__wrapped__"
"""functools.wraps sets it, whether the wrapper calls that or not."""


def attribute_of(found: Any, name: str, default: Any = None) -> Any:
    """Return an attribute, or the default where reading it raises anything."""
    try:
        return getattr(found, name, default)
    except Exception:
        return default


def layers_of(function: Any) -> Iterator[Any]:
    """Yield the function and the functions that it wraps, from the outside in."""
    seen: dict[int, Any] = {}  # which keeps them alive: a new object may have the number of one that is gone
    while function is not None and id(function) not in seen and len(seen) < _MOST_LAYERS:
        seen[id(function)] = function
        yield function
        below = function.func if type(function) is functools.partial else None
        function = attribute_of(function, HIDDEN, below)


def innermost(function: Any) -> Any:
    """Return the lowest layer of a function; None for None."""
    for layer in layers_of(function):
        function = layer
    return function
