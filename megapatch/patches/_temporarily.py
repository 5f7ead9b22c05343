"""Set attributes of one object for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def temporarily_set(target: Any, **values: Any) -> Iterator[None]:
    """Set the object's own attributes; afterwards it has its old ones again, or its class's."""
    before = {name: vars(target)[name] for name in values if name in vars(target)}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(target, name, before[name])
            else:
                delattr(target, name)
