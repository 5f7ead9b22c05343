"""Considers each patch once its module is there: settings, diagnosis, installation, record.

No lock is held over an import, and each site has a lock of its own: a thread that is importing a target and
one that calls `apply()` never wait for each other in a circle.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from .._version import see
from ..patch import Patch, PatchInfo, Status
from ..patches import _catalogue
from . import entry_points, watch
from .edges import APPLIED, broken_modules_are_logged, clean_record
from .first_sign import FirstSign
from .record import Off, Record, Unloaded
from .roster import Roster
from .settings import Settings

if TYPE_CHECKING:
    from .site_record import SiteRecord

log = logging.getLogger("megapatch")
log.addFilter(clean_record)


class Engine:
    """Watches, considers, installs and restores the patches of one process."""

    def __init__(self, patches: Iterable[Patch], settings: Settings, unloaded: Iterable[Unloaded] = ()) -> None:
        self.settings = settings
        self.roster = Roster(patches, settings, unloaded)
        self.first_sign = FirstSign(log, settings.quiet)
        self._activating = threading.Lock()
        self._active = False
        self._watched: set[str] = set()
        self._warned_of: set[str] = set()
        self._applied: list[SiteRecord] = []  # sites that were applied, and that no handler has heard of

    @property
    def records(self) -> tuple[Record, ...]:
        """One record for each site, and for patches that are not loaded, in the order of the reports."""
        return self.roster.records

    @property
    def patches(self) -> tuple[Patch, ...]:
        """The patches that are loaded, in order."""
        return self.roster.patches

    # ------------------------------------------------------------------------ for the user
    def activate(self) -> None:
        """Watch for every target, and patch the loaded ones; a second call only looks again.

        Raises:
            StrictError: with MEGAPATCH_STRICT, when a site needs attention.
        """
        with self._activating:
            first, self._active = not self._active, True
        if first and (home := watch.other_copy()) is not None:  # two would patch everything twice
            self._stay_off(home)
        if not self._active:
            return
        if first:
            self._warn_of_settings()
        watch.call_when_missed(self._on_missed)
        self._consider_all_loaded()
        self._raise_if_strict(self.records)

    def apply(self) -> None:
        """Consider every site whose module is loaded, restored ones too; patches in place stay as they are.

        Raises:
            StrictError: with MEGAPATCH_STRICT, when a site needs attention.
        """
        for record in self.records:
            record.allow_again()
        self._consider_all_loaded()
        self._raise_if_strict(self.records)

    def restore(self, *names: str) -> None:
        """Put back the originals of the named patches (names or globs), or of all, until `apply()`.

        Patches that were installed below the others stay, whatever the names: see `install_below`.

        Raises:
            MegapatchError: for an unknown name.
            RestoreError: when someone else has patched a target on top of megapatch; nothing is changed then.
        """
        self.load_families()  # so that restored ones stay away when their module is imported
        from .restoring import records_of

        self._restore(records_of(self.roster, set(names or "*") - _catalogue.RETIRED.keys()))

    def _restore(self, chosen: Collection[Record]) -> None:
        if chosen:  # the audit takes nothing off when it starts before Megatron is imported
            from .restoring import restore

            restore(chosen)

    def install_below(self, patches: Collection[Patch | Unloaded]) -> None:
        """Install these patches below all others, whatever the settings; unloaded ones when they are due.

        They replace the ones that an earlier call has installed; without patches, a call only takes those away.
        The other patches are taken off for a moment, so no patched function may run meanwhile.

        Raises:
            RestoreError: when someone else has patched on top of megapatch; nothing is changed then.
        """
        taken_off = [record for record in self.roster.sites if record.installed]
        self._restore(taken_off)
        try:
            self.roster.replace_lowest(patches)
        finally:
            for record in taken_off:
                record.allow_again()
            if self._active:
                self._consider_all_loaded()

    def _stay_off(self, home: str) -> None:
        """Leave this process to the copy of megapatch in the folder `home`."""
        self._active = False
        self.first_sign.hush()  # the copy that stays has a sign of its own
        for record in self.records:
            record.stay_away(Off.SECOND_COPY)
        log.warning(
            "megapatch was loaded twice: the copy in %s stays, this one is off" + see("loaded-twice"), home
        )

    def load_families(self, only_installed: bool = False) -> None:
        """Load all of megapatch's own patches now, whether their targets are imported or not.

        Args:
            only_installed: not those of which no module can be imported: a report has the same status for them.
        """
        due = [record for record in self.roster.unloaded if record.names_are_known]
        if only_installed:
            for record in due:
                record.refresh()
            due = [record for record in due if record.status is not Status.NOT_INSTALLED]
        _note_looked_for(self._load(*due))

    def load_all(self) -> None:
        """Load all patches now, those of entry points as well."""
        _note_looked_for(self._load(*self.roster.unloaded))

    # ------------------------------------------------------------------------ when something is loaded
    def _load(self, *unloaded: Unloaded) -> list[SiteRecord]:
        """Load patches, watch for their targets, and return the records of their sites."""
        loaded: list[SiteRecord] = []
        for record in unloaded:
            sites = self.roster.load(record)
            self._watch(*(site.where for site in sites))
            loaded += sites
            self._warn_of_settings()
        return loaded

    def _watch(self, *names: str) -> None:
        """Watch these modules once; again only when that was interrupted."""
        for name in names:
            if name not in self._watched:
                watch.call_when_loaded(name, functools.partial(self._on_loaded, name))
                self._watched.add(name)

    def _on_loaded(self, name: str, module: ModuleType) -> None:
        """Import hook: patch a target that has just been loaded."""
        self._raise_if_strict(self._consider_during_import(name, module))

    def _on_missed(self) -> None:
        """Import hook: patch targets that were imported behind another import hook."""
        self._raise_if_strict(self._consider_during_import())

    def _consider_all_loaded(self) -> None:
        """For the user's calls, load the patches of all loaded modules, and consider their sites.

        This waits for other threads that import or consider a target. So never call it where this thread holds an
        import lock, which they may want.
        """
        try:
            with broken_modules_are_logged():
                self._load_due(watch.loaded)
                # One by one, as this waits: no import keeps the sites back that come before its own.
                self._consider(
                    (record, module, True)
                    for record in self.roster.sites
                    if (module := watch.loaded(record.where)) is not None
                )
                self._announce()
        finally:  # after Ctrl-C, too
            _note_looked_for(self.records)

    def _consider_during_import(self, name: str | None = None, module: ModuleType | None = None) -> list[Record]:
        """Import hooks: do the same for one target, or for all, and wait for no import of another thread.

        Args:
            name: a target that has just been loaded, as this `module`; its spec still says that it is being
                imported. Without it all loaded modules are considered.

        Returns:
            The records that were considered.
        """

        def find(target: str) -> ModuleType | None:
            return module if target == name else watch.loaded(target, wait=False)

        considered: list[Record] = []
        new: list[SiteRecord] = []
        try:
            with broken_modules_are_logged():
                due, new = self._load_due(find)
                considered += due
                sites = [
                    (record, loaded, record.where == name)
                    for record in self._sites_concerned(name)
                    if (loaded := find(record.where)) is not None
                ]
                considered += [record for record, *_ in sites]
                self._consider(sites)
                self._announce(name)
        finally:  # after Ctrl-C, too
            _note_looked_for(new)  # not all records: another thread may be about to look for the others
        return considered

    def _load_due(self, find: Callable[[str], ModuleType | None]) -> tuple[list[Unloaded], list[SiteRecord]]:
        """Watch every target, and load the patches of which a module is loaded.

        Return the records of what was to be loaded, and those of the sites that it has.
        """
        if self._active:
            self._watch(*(name for record in self.records for name in record.modules))
        due = [record for record in self.roster.unloaded if any(find(name) is not None for name in record.modules)]
        return due, self._load(*due)

    def _consider(self, sites: Iterable[tuple[SiteRecord, ModuleType, bool]]) -> None:
        if self.roster.sites:  # most processes that import megapatch import nothing that it patches
            from .site_record import consider

            self._applied += consider(sites)

    def _sites_concerned(self, name: str | None) -> list[SiteRecord]:
        """Return the sites to consider once this target is loaded; all of them if it is None.

        Sites of other modules are among them if they were not considered before: a module that was half-loaded in
        our own thread gets no event of its own.
        """
        return [
            record
            for record in self.roster.sites
            if name in (None, record.where) or record.status in (Status.PENDING, Status.MISSED)
        ]

    # ------------------------------------------------------------------------ messages
    def _announce(self, loaded: str | None = None) -> None:
        """Log the applied patches, once the outermost target is loaded: one line for a Megatron, whose modules
        import each other.

        Args:
            loaded: the target that was loaded just now; its spec still says that it is being imported.
        """
        if bad := next((record for record in self.records if record.status.needs_attention), None):
            self.first_sign.not_in_place(f"{bad.name} is {bad.status.value} at {bad.where}")
        under_way = (watch.half_loaded(sys.modules.get(name)) for name in self._watched if name != loaded)
        if self._applied and not any(under_way):
            if self.first_sign.is_heard():
                applied, self._applied = self._applied, []
                from .wording import what_was_applied

                log.info(APPLIED, what_was_applied(record for record in applied if record.installed))
            # The audit's sites repair nothing.
            elif any(record not in self.roster.lowest for record in self._applied):
                self.first_sign.applied()

    def _warn_of_settings(self) -> None:
        if not self.settings.may_be_wrong:
            return
        from .complaints import unknown_variables, warn_of_a_setting  # few environments have any

        for complaint in (*unknown_variables(self.settings.others), *self.roster.complaints()):
            problem = complaint.partition(";")[0]  # the names that it suggests change as patches are loaded
            if problem not in self._warned_of:
                self._warned_of.add(problem)
                warn_of_a_setting(complaint)

    def _raise_if_strict(self, records: Iterable[Record]) -> None:
        if self.settings.strict:
            from . import strict  # most processes are not strict

            strict.raise_for(records)


def _note_looked_for(records: Iterable[Record]) -> None:
    """Have these records count as missed from now on, if their module is loaded and was not considered."""
    for record in records:
        record.looked_for = True


def own_patches() -> Iterator[Unloaded]:
    """Yield a record of each of megapatch's own patches, in the catalogue's order.

    A patch's file is imported when one of its targets' modules is. So `import megapatch` costs the same whatever
    the patches do, and a process pays for those that it uses.
    """
    for family, modules_by_name in _catalogue.CATALOGUE.items():
        for name, modules in modules_by_name.items():
            info = PatchInfo(name, f"{name} is not loaded.", None, modules)
            load = functools.partial(_load, name)
            yield Unloaded(name, f"megapatch.patches.{family}", (info,), load, names_are_known=True)


def _load(name: str) -> tuple[Patch]:
    return (_catalogue.of_name(name),)


def _third_parties(settings: Settings) -> Iterable[Unloaded]:
    """Return a record of each patch of another distribution: most have none."""
    if not entry_points.may_be_there(settings):
        return ()
    from .third_party import records

    return records(settings)


@functools.cache
def this_process() -> Engine:
    """Return the engine of this process: one, even if `import megapatch` fails at first and is repeated."""
    settings = Settings.from_environment()
    engine = Engine((), settings, (*own_patches(), *_third_parties(settings)))
    engine.first_sign.watch_exit()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=watch.after_fork)
    return engine
