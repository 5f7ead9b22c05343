"""Considers each patch once its module is there: settings, diagnosis, installation, record.

No lock is held over an import, and each site has a lock of its own: a thread that is importing a target and
one that calls `apply()` never wait for each other in a circle.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Iterable
from functools import partial
from types import ModuleType

from . import watch
from .install import Installed, check_in_place, install, uninstall
from .patch import NEEDS_ATTENTION, MegapatchError, Patch, Site, Status, Verdict, VerdictKind
from .settings import Settings, matching, unknown_name
from .versions import find_module

log = logging.getLogger("megapatch")

_STATUS_OF_VERDICT = {
    VerdictKind.FIXED: Status.NOT_NEEDED,
    VerdictKind.ABSENT: Status.NOT_NEEDED,
    VerdictKind.UNSUPPORTED: Status.UNSUPPORTED,
    VerdictKind.UNKNOWN: Status.REFUSED,
}
_NOT_IMPORTED = "not imported yet"
_RESTORED = "restored in this process; megapatch.apply() installs it again"


class SiteRecord:
    """What became of one site in this process."""

    def __init__(self, patch: Patch, site: Site, disabled: str | None) -> None:
        self.patch, self.site = patch, site
        self.lock = threading.RLock()
        self.status = Status.DISABLED if disabled else Status.PENDING
        self.reason = disabled or _NOT_IMPORTED
        self.traceback: str | None = None
        self.installed: tuple[Installed, ...] = ()
        self.disabled = disabled

    def set(self, status: Status, reason: str, trace: str | None = None) -> None:
        """Record the status; one that needs attention is logged at WARNING, once."""
        news = (status, reason) != (self.status, self.reason)
        self.status, self.reason, self.traceback = status, reason, trace
        if news and status in NEEDS_ATTENTION:
            what = f"{self.patch.name}: {self.site.module} is {status.value}: {reason}"
            log.warning("%s", f"{what}\n{trace}" if trace else what)

    def consider(self, module: ModuleType) -> None:
        """Diagnose the loaded module and install what is needed; never raises."""
        with self.lock:
            if self.disabled or (self.installed and not self._lost()):
                return
            try:
                verdict = self.site.diagnose(module)
                if not isinstance(verdict, Verdict):
                    raise TypeError(f"diagnose returned {verdict!r}, not a Verdict")
                if verdict.kind is VerdictKind.NEEDED:
                    self.installed = install(self.patch.name, module, self.site)
                    self.set(Status.APPLIED, verdict.reason)
                else:
                    self.set(_STATUS_OF_VERDICT[verdict.kind], verdict.reason)
            except Exception as error:  # a bug of ours must not break the user's import
                self.set(Status.FAILED, f"{type(error).__name__}: {error}", traceback.format_exc())

    def refresh(self) -> None:
        """Bring the status up to date with what has happened outside: replaced, reloaded, not there at all."""
        with self.lock:
            if self.installed:
                self._lost()
            elif self.status in (Status.PENDING, Status.NOT_INSTALLED):
                if self.site.module in sys.modules:
                    self.set(Status.PENDING, "its import is under way")
                elif find_module(self.site.module) is None:
                    self.set(Status.NOT_INSTALLED, "there is no such module to import")
                else:
                    self.set(Status.PENDING, _NOT_IMPORTED)

    def _lost(self) -> bool:
        """Whether the module was loaded anew, so that nothing of ours is in it; notes who overwrote us."""
        gone = [one for one in self.installed if not one.is_in_place]
        imported_anew = sys.modules.get(self.site.module) not in (None, self.installed[0].module)
        if imported_anew or (gone and all(one.was_reloaded for one in gone)):
            self.installed = ()
            self.set(Status.PENDING, "reloaded; megapatch.apply() patches the new code")
            return True
        if gone:
            others = "; ".join(f"{one.target} is now {one.overwritten_by()}" for one in gone)
            self.set(Status.OVERWRITTEN, f"replaced after megapatch: {others}")
        elif self.status is Status.OVERWRITTEN:
            self.set(Status.APPLIED, "in place again")
        return False


class Engine:
    """The patches of one process and what became of them."""

    def __init__(self, patches: Iterable[Patch], settings: Settings) -> None:
        self.patches = tuple(patches)
        self.settings = settings
        self.names = tuple(patch.name for patch in self.patches)
        self.records = tuple(
            SiteRecord(patch, site, settings.why_disabled(patch.name))
            for patch in self.patches
            for site in patch.sites
        )
        self._activating = threading.Lock()
        self._active = False

    def activate(self) -> None:
        """Watch for every target and patch what is there; a second call only looks again."""
        with self._activating:
            first, self._active = not self._active, True
        if first:
            for complaint in self.settings.complaints(self.names):
                log.warning("%s", complaint)
            for name in dict.fromkeys(record.site.module for record in self.records):
                watch.watch(name, partial(self._on_loaded, name))
        self._look()
        if first:
            log.info("%s", self._one_line())

    def apply(self) -> None:
        """Consider every site whose module is loaded, restored ones too; what is in place stays as it is."""
        for record in self.records:
            if record.disabled == _RESTORED:
                record.disabled = None
                record.set(Status.PENDING, _NOT_IMPORTED)
        self._look()

    def restore(self, *names: str) -> None:
        """Put back the originals of the named patches (names or globs; all without names) until `apply()`.

        Raises MegapatchError for an unknown name, and RestoreError, with nothing changed, when a target has
        been patched by someone else on top of megapatch.
        """
        for name in names:
            if not matching(name, self.names):
                raise MegapatchError(unknown_name(name, self.names))
        chosen = [
            record
            for record in self.records
            if not names or any(matching(name, [record.patch.name]) for name in names)
        ]
        for record in chosen:
            check_in_place(record.installed)
        for record in chosen:
            with record.lock:
                uninstall(record.installed)
                record.installed = ()
                if not record.disabled:
                    record.disabled = _RESTORED
                    record.set(Status.DISABLED, _RESTORED)

    def _look(self) -> None:
        for record in self.records:
            if module := watch.loaded(record.site.module):
                record.consider(module)

    def _on_loaded(self, name: str, module: ModuleType) -> None:
        for record in self.records:
            if record.site.module == name:
                record.consider(module)
        # A module that was half-loaded in our own thread gets no event of its own. No waiting here: this thread
        # holds the import lock of `name`, and who is importing the other module may want it.
        for record in self.records:
            if record.status is Status.PENDING and (other := watch.loaded(record.site.module, wait=False)):
                record.consider(other)

    def _one_line(self) -> str:
        count = dict.fromkeys((Status.APPLIED, Status.PENDING, Status.DISABLED), 0)
        for record in self.records:
            if record.status in count:
                count[record.status] += 1
        state = ", ".join(f"{number} {status.value}" for status, number in count.items() if number)
        numbers = [patch.name for patch in self.patches if patch.changes_numbers]
        changing = f"; may change numbers: {', '.join(numbers)}" if numbers else ""
        return f"megapatch is active: {state or 'nothing to do'} (sites){changing}; see `megapatch doctor`"
