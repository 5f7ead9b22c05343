"""Attributes of objects: at a dotted path, such as ``"Class.method"``, and set for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def find(owner: Any, path: str) -> Any:
    """Return the object at the path below `owner`, which an empty path means; None where there is none."""
    for name in filter(None, path.split(".")):
        owner = getattr(owner, name, None)
    return owner


@contextlib.contextmanager
def temporarily_set(target: Any, **values: Any) -> Iterator[None]:
    """Set the object's own attributes; afterwards it has its old ones again, or its class's.

    An attribute that somebody else has set meanwhile stays.
    """
    before = {name: vars(target)[name] for name in values if name in vars(target)}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        own = vars(target)
        for name in [name for name, value in values.items() if name in own and own[name] is value]:
            if name in before:
                setattr(target, name, before[name])
            else:
                delattr(target, name)
