"""What became of one site in this process: considered, installed, overwritten, restored."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from types import ModuleType

from . import versions
from .install import install, uninstall
from .patch import NEEDS_ATTENTION, Patch, Site, Status, Verdict, VerdictKind
from .target import Installed, Rebuilt

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
    """One site of a patch, its status and why, and what was installed there."""

    def __init__(self, patch: Patch, site: Site, disabled: str | None) -> None:
        self.patch, self.site = patch, site
        self.lock = threading.RLock()
        self.status = Status.DISABLED if disabled else Status.PENDING
        self.reason = disabled or _NOT_IMPORTED
        self.verdict: Verdict | None = None
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

    def fail(self, error: BaseException) -> None:
        """Record an exception that is being handled, with its traceback."""
        self.set(Status.FAILED, f"{type(error).__name__}: {error}", traceback.format_exc())

    def consider(self, module: ModuleType) -> bool:
        """Diagnose the loaded module and install what is needed; whether something was. Never raises."""
        with self.lock:
            if self.disabled or (self.installed and not self._lost()):
                return False
            try:
                verdict = self.site.diagnose(module)
                if not isinstance(verdict, Verdict):
                    raise TypeError(f"diagnose returned {verdict!r}, not a Verdict")
                self.verdict = verdict
                if verdict.kind is VerdictKind.NEEDED:
                    self.installed = install(self.patch.name, module, self.site)
                    self.set(Status.APPLIED, verdict.reason)
                    return True
                known = versions.remark(self.site.module) if verdict.kind is VerdictKind.UNKNOWN else ""
                self.set(_STATUS_OF_VERDICT[verdict.kind], verdict.reason + known)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a bug of ours must not break the user's import
                self.fail(error)
            return False

    def restore(self) -> None:
        """Put back the originals, and stay away until `allow_again()`."""
        with self.lock:
            uninstall(self.installed, self.site)
            self.installed = ()
            if not self.disabled:
                self.disabled = _RESTORED
                self.set(Status.DISABLED, _RESTORED)

    def allow_again(self) -> None:
        """Take back a restore; what the environment has switched off stays off."""
        with self.lock:
            if self.disabled == _RESTORED:
                self.disabled = None
                self.set(Status.PENDING, _NOT_IMPORTED)

    def refresh(self) -> None:
        """Bring the status up to date with what has happened outside: replaced, reloaded, not there at all."""
        with self.lock:
            if self.installed:
                self._lost()
            elif self.status in (Status.PENDING, Status.NOT_INSTALLED):
                if self.site.module in sys.modules:
                    self.set(Status.PENDING, "its import is under way")
                elif versions.find_module(self.site.module) is None:
                    self.set(Status.NOT_INSTALLED, "there is no such module to import")
                else:
                    self.set(Status.PENDING, _NOT_IMPORTED)

    def _lost(self) -> bool:
        """Whether the module was loaded anew, so that nothing of ours is in it; notes who overwrote us."""
        gone = [one for one in self.installed if not one.is_in_place]
        imported_anew = sys.modules.get(self.site.module) not in (None, self.installed[0].module)
        functions = [one for one in gone if not isinstance(one, Rebuilt)]
        if imported_anew or (functions and all(one.was_reloaded for one in functions)):
            self.installed = ()
            self.set(Status.PENDING, "reloaded; megapatch.apply() patches the new code")
            return True
        if gone:
            others = "; ".join(f"{one.target} is now {one.overwritten_by()}" for one in gone)
            self.set(Status.OVERWRITTEN, f"replaced after megapatch: {others}")
        elif self.status is Status.OVERWRITTEN:
            self.set(Status.APPLIED, "in place again")
        return False
