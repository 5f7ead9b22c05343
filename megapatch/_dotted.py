"""The object at a dotted path, such as ``"Class.method"``, below another."""

from __future__ import annotations

from typing import Any


def find(owner: Any, path: str) -> Any:
    """Return the object at the path below `owner`, which an empty path means; None where there is none."""
    for name in filter(None, path.split(".")):
        owner = getattr(owner, name, None)
    return owner
