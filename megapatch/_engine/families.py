"""megapatch's own patches, each family of which is imported when one of its targets' modules is.

So `import megapatch` costs the same whatever the number of families, and a process pays for those that it uses.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ..patch import PatchInfo
from ..patches import _catalogue
from .record import Unloaded


def families() -> Iterator[Unloaded]:
    """Yield a record of each family, in the catalogue's order."""
    for family, modules_by_name in _catalogue.CATALOGUE.items():
        patches = tuple(
            PatchInfo(name, f"{name} is not loaded.", None, tuple(modules))
            for name, modules in modules_by_name.items()
        )
        load = functools.partial(_catalogue.of_family, family)
        yield Unloaded(f"{family}.*", f"megapatch.patches.{family}", patches, load, names_are_known=True)
