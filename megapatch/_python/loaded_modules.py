"""The loaded modules' names, read without running anything of theirs.

Anybody may put anything into `sys.modules`: lazy modules, which load when an attribute is read; objects of other
kinds; modules without a dictionary (in `py` 1.11 the ``__dict__`` of ``py.test`` is None).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_read_dict: Any = vars(ModuleType)["__dict__"].__get__


def names_of(module: object) -> dict[str, Any] | None:
    """Return the module's own dictionary; None if it has none, or is not a module."""
    if not issubclass(type(module), ModuleType):  # isinstance would read __class__, and so load a lazy module
        return None
    names = _read_dict(module)
    return names if isinstance(names, dict) else None


def loaded_modules() -> Iterator[tuple[str, dict[str, Any]]]:
    """Go through the loaded modules: each with the name that `sys.modules` has for it, and its dictionary."""
    for name, module in list(sys.modules.items()):
        if (names := names_of(module)) is not None:
            yield name, names
