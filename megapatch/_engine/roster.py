"""The patches of one process: a record for each site, and for patches that are not loaded."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from ..patch import Patch, PatchInfo, Site, Status
from .record import Off, Record, Unloaded
from .settings import Settings

if TYPE_CHECKING:
    from .site_record import SiteRecord


class Roster:
    """The records of one process. A change replaces all of them at once, so that no reader finds half of it.

    Attributes:
        records: in the order of the reports.
        lowest: those of the patches that were installed below all others.
    """

    def __init__(self, patches: Iterable[Patch], settings: Settings, unloaded: Iterable[Unloaded]) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self.records: tuple[SiteRecord | Unloaded, ...] = ()
        self.lowest: tuple[SiteRecord | Unloaded, ...] = ()
        for patch in patches:
            self.records += self._records_of(patch, self.records)
        self.records += tuple(unloaded)

    @property
    def sites(self) -> list[SiteRecord]:
        return [record for record in self.records if not isinstance(record, Unloaded)]

    @property
    def unloaded(self) -> list[Unloaded]:
        return [record for record in self.records if isinstance(record, Unloaded)]

    @property
    def patches(self) -> tuple[Patch, ...]:
        """The patches that are loaded."""
        return tuple(dict.fromkeys(record.patch for record in self.sites))

    @property
    def known_patches(self) -> tuple[PatchInfo, ...]:
        """The patches that users switch on and off: those that are loaded, and the known facts of the others.

        Not the lowest ones: they follow no settings, and only `Engine.install_below` takes them away.
        """
        records = [record for record in self.records if record not in self.lowest]
        return tuple(dict.fromkeys(patch for record in records for patch, _ in record.rows()))

    def complaints(self) -> list[str]:
        """List the problems of the MEGAPATCH_* environment."""
        third_parties = [record for record in self.unloaded if not record.names_are_known]
        more_to_come = any(record.status is Status.PENDING for record in third_parties)
        from .complaints import complaints  # few environments have any

        return complaints(self._settings, [patch.name for patch in self.known_patches], more_to_come)

    def load(self, unloaded: Unloaded) -> tuple[SiteRecord, ...]:
        """Put records of the patches' sites in its place, and return them; if loading fails, it stays.

        No lock is held during the import. If two threads load it at once, the second changes nothing.
        """
        patches = unloaded.load()
        with self._lock:
            if not patches or unloaded not in self.records:
                return ()
            position = self.records.index(unloaded)
            before, after = self.records[:position], self.records[position + 1 :]
            added: tuple[SiteRecord, ...] = ()
            is_lowest = unloaded in self.lowest
            for patch in patches:
                added += _of_lowest(patch) if is_lowest else self._records_of(patch, (*before, *added, *after))
            self.lowest += added if is_lowest else ()
            self.records = (*before, *added, *after)
        return added

    def replace_lowest(self, patches: Collection[Patch | Unloaded]) -> None:
        """Begin with these patches, whatever the settings, instead of those that were the lowest before."""
        with self._lock:
            others = [record for record in self.records if record not in self.lowest]
            self.lowest = tuple(
                record
                for patch in patches
                for record in ((patch,) if isinstance(patch, Unloaded) else _of_lowest(patch))
            )
            self.records = (*self.lowest, *others)

    def _records_of(self, patch: Patch, others: Iterable[Record]) -> tuple[SiteRecord, ...]:
        """Return a record for each site; the second of two patches with one name stays off."""
        known = [(other, record.off) for record in others for other, _ in record.rows()]
        if any(other is patch for other, _ in known):
            return ()
        why_off = self._settings.why_disabled(patch.name, patch.changes_numbers)
        records = tuple(_record_of(patch, site, why_off) for site in patch.sites)
        if any(other.name == patch.name and off is not Off.DUPLICATE for other, off in known):
            for record in records:
                record.off = Off.DUPLICATE
                record.set(Status.FAILED, f"there is another patch called {patch.name}; this one stays off")
        return records


def _of_lowest(patch: Patch) -> tuple[SiteRecord, ...]:
    return tuple(_record_of(patch, site, None) for site in patch.sites)


def _record_of(patch: Patch, site: Site, why_off: str | None) -> SiteRecord:
    from .site_record import SiteRecord  # most processes that import megapatch import nothing that it patches

    return SiteRecord(patch, site, why_off)
