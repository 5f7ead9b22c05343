"""An attribute of one object, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def in_place_of(thing: Any, name: str, value: Any) -> Iterator[None]:
    """`value` as the object's own attribute; afterwards what it had, or its class's again."""
    had, before = name in vars(thing), vars(thing).get(name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        if had:
            setattr(thing, name, before)
        else:
            delattr(thing, name)
