"""Attributes of objects: at a dotted path, such as ``"Class.method"``, and set for a while."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


def below(owner: Any, path: str) -> tuple[Any, str]:
    """Follow all but the last name of the path into submodules; return the last of them, and the rest of the path.

    The last name is an attribute, of which a submodule may have the name as well.
    """
    name, _, rest = path.partition(".")
    while rest and (found := _submodule(owner, name)):
        owner, path = getattr(owner, name, found), rest
        name, _, rest = path.partition(".")
    return owner, path


def find(owner: Any, path: str) -> Any:
    """Return the object at the path below `owner`, which an empty path means; None where there is none."""
    for name in filter(None, path.split(".")):
        owner = getattr(owner, name, _submodule(owner, name))
    return owner


def _submodule(owner: Any, name: str) -> ModuleType | None:
    """Return a package's submodule, also where the package has it not as an attribute.

    A package that is imported again, after Ctrl-C has ended its import, lacks them: they are in sys.modules.
    """
    return sys.modules.get(f"{owner.__name__}.{name}") if isinstance(owner, ModuleType) else None


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
