"""megapatch's own patches, each family of which is imported when one of its targets' modules is.

So `import megapatch` costs the same whatever the number of families, and a process pays for those that it uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..patch import Patch, Site, Status
from ..patches._catalogue import CATALOGUE, of_family
from .record import Placeholder, never

if TYPE_CHECKING:
    from .settings import Settings


class FamilyRecord(Placeholder):
    """Stands for a site of a patch until the patch's family is imported."""

    names_are_known = True

    def __init__(self, name: str, module: str, settings: Settings) -> None:
        patch = Patch(name, f"{name} is not loaded.", upstream="", sites=(Site(module=module, diagnose=never),))
        super().__init__(patch, patch.sites[0], settings.why_disabled(name))
        self.source = patch.family

    def load(self) -> tuple[Patch, ...]:
        if self.status is Status.FAILED:
            return ()
        try:
            return of_family(self.patch.family)
        except Exception as error:  # must not break the user's import
            self.fail(error)
            return ()


def records(settings: Settings) -> Iterator[FamilyRecord]:
    """Return what stands for all of megapatch's own patches, in the catalogue's order."""
    for modules_by_name in CATALOGUE.values():
        for name, modules in modules_by_name.items():
            for module in modules:
                yield FamilyRecord(name, module, settings)
