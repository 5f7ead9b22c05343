"""All patches: a package for each family, a file for each patch.

A patch's file is imported when one of the modules that it watches is; `_catalogue` names both.
A module whose name begins with an underscore is shared by patches.
"""

from __future__ import annotations

from typing import Any

from ._catalogue import CATALOGUE, of_family


def __getattr__(name: str) -> Any:
    """Return PATCHES, the patches of all families in order, which this imports."""
    if name == "PATCHES":
        return tuple(patch for family in CATALOGUE for patch in of_family(family))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
