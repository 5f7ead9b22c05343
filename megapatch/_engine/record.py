"""What became of one site in this process: considered, installed, overwritten, restored."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from types import ModuleType

from .. import _versions
from ..patch import NEEDS_ATTENTION, Patch, Site, Status, Verdict, VerdictKind
from . import watch
from .holders import Holder
from .install import check_in_place, install, rebind, take_out, uninstall
from .target import RebuiltTarget, ReplacedTarget

log = logging.getLogger("megapatch")

_STATUS_OF_VERDICT = {
    VerdictKind.FIXED: Status.NOT_NEEDED,
    VerdictKind.ABSENT: Status.NOT_NEEDED,
    VerdictKind.UNSUPPORTED: Status.UNSUPPORTED,
    VerdictKind.UNKNOWN: Status.REFUSED,
}
_NOT_IMPORTED = "not imported yet"
_LOADED_SINCE = "loaded, and not looked at since; megapatch.apply() patches the new code"
_RESTORED = "restored in this process; megapatch.apply() installs it again"


def _throw(error: BaseException) -> None:
    raise error


class SiteRecord:
    """One site of a patch, its status and why, and what was installed there."""

    def __init__(self, patch: Patch, site: Site, disabled: str | None) -> None:
        self.patch, self.site = patch, site
        self.lock = threading.RLock()
        self.status = Status.DISABLED if disabled else Status.PENDING
        self.reason = disabled or _NOT_IMPORTED
        self.verdict: Verdict | None = None
        self.traceback: str | None = None
        self.installed: tuple[ReplacedTarget, ...] = ()
        self.disabled = disabled
        self._half = False  # `installed` is not all, or could not be taken out
        self._rebound = False  # the holders of what is installed have been looked for
        self._earlier: tuple[ReplacedTarget, ...] = ()  # before a reload; others may hold those replacements still

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
        """Diagnose the loaded module and install what is needed; whether `rebind` has to follow.

        Raises nothing but KeyboardInterrupt.
        """
        if self._is_ours():
            return False  # what our diagnosis imports is a reason to look, but not here
        with self.lock:
            if self.disabled:
                return False
            if self.installed and not self._half and not self._lost():
                return not self._rebound
            self._all_or_none(lambda: self._judge_and_install(module))
            return bool(self.installed) and not self._half

    def rebind(self, installed: tuple[ReplacedTarget, ...], found: Mapping[int, list[Holder]]) -> None:
        """Give what `consider` has installed to the other holders of the originals, which were looked for since;
        only then is it applied.

        Raises nothing but KeyboardInterrupt.
        """
        with self.lock:
            # Else another thread has done it, or restored, and perhaps installed anew.
            if installed and self.installed is installed and not self._half and not self._rebound:
                self._all_or_none(lambda: self._rebind(found))

    def give_up(self, error: BaseException) -> None:
        """Take out what is not applied yet, as `consider` and `rebind` cannot both be done."""
        with self.lock:
            if not (self.installed and self._rebound):
                self._all_or_none(functools.partial(_throw, error))

    def _all_or_none(self, change: Callable[[], None]) -> None:
        """Whatever goes wrong in it: nothing of ours stays, a bug is recorded and forgiven, Ctrl-C goes on."""
        try:
            change()
        except KeyboardInterrupt:
            self._take_out()
            self.set(Status.PENDING, "interrupted; megapatch.apply() tries again")
            raise
        except BaseException as error:  # a bug of ours must not break the user's import
            self.fail(error)
            try:
                self._take_out()
            except Exception as another:
                self.fail(another)

    def _judge_and_install(self, module: ModuleType) -> None:
        self._take_out()  # what is left of an attempt that failed
        if any(one.at(module) is one.replacement for one in self._earlier):
            self._take_out_earlier()  # only some of it was loaded anew
        verdict = self.site.diagnose(module)
        if not isinstance(verdict, Verdict):
            raise TypeError(f"diagnose returned {verdict!r}, not a Verdict")
        self.verdict = verdict
        if verdict.kind is VerdictKind.NEEDED:
            self._half, self._rebound = True, False
            install(self.patch.name, module, self.site, self._note)
            self._half = False
        else:
            known = _versions.remark(self.site.module) if verdict.kind is VerdictKind.UNKNOWN else ""
            self.set(_STATUS_OF_VERDICT[verdict.kind], verdict.reason + known)

    def _rebind(self, found: Mapping[int, list[Holder]]) -> None:
        rebind(self.installed, found)
        assert self.verdict is not None
        self.set(Status.APPLIED, self.verdict.reason)
        self._rebound = True

    def _note(self, one: ReplacedTarget) -> None:
        self.installed = (*self.installed, one)

    def _take_out(self) -> None:
        """Leave nothing in place; what cannot be taken out stays in `installed`, and the error says why."""
        self._half = True
        try:
            take_out(self.installed)
        finally:
            self.installed = tuple(one for one in self.installed if one.is_put_in)
        self._half = False

    def restore(self) -> None:
        """Put back the originals, and stay away until `allow_again()`.

        Raises RestoreError, with nothing changed, when someone has patched on top.
        """
        with self.lock:
            check_in_place(self.installed)
            try:
                self._take_out_earlier()
                uninstall(self.installed, self.site)
            finally:
                self.installed = tuple(one for one in self.installed if one.is_put_in)
            if not self.disabled:
                self.disabled = _RESTORED
                self.set(Status.DISABLED, _RESTORED)

    def _take_out_earlier(self) -> None:
        uninstall(self._earlier, self.site)  # still known afterwards: who patched on top may put one back

    def after_fork(self) -> bool:
        """In a forked child: let go of what other threads held, who are not here; whether they left something
        undone, which `consider` and `rebind` do anew."""
        if self._is_ours():
            return False  # we go on with it ourselves
        if not self.lock.acquire(blocking=False):
            self.lock, self._half = threading.RLock(), True
        else:
            self.lock.release()
        return self._half or bool(self.installed and not self._rebound)

    def _is_ours(self) -> bool:
        """Whether this thread holds the lock."""
        return self.lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def allow_again(self) -> None:
        """Take back a restore; what the environment has switched off stays off."""
        with self.lock:
            if self.disabled == _RESTORED:
                self.disabled = None
                self.set(Status.PENDING, _NOT_IMPORTED)

    def refresh(self) -> None:
        """Bring the status up to date with what has happened outside: replaced, reloaded, not there at all."""
        with self.lock:
            if self._half:
                return  # the status tells what went wrong
            if self.installed:
                self._lost()
            elif self.status in (Status.PENDING, Status.NOT_INSTALLED):
                module = sys.modules.get(self.site.module)
                if module is not None:
                    under_way = watch.half_loaded(module)
                    self.set(Status.PENDING, "its import is under way" if under_way else _LOADED_SINCE)
                elif _versions.find_module(self.site.module) is None:
                    self.set(Status.NOT_INSTALLED, "there is no such module to import")
                else:
                    self.set(Status.PENDING, _NOT_IMPORTED)

    def _lost(self) -> bool:
        """Whether the module was loaded anew, so that nothing of ours is in it; notes who overwrote us."""
        gone = [one for one in self.installed if not one.is_in_place]
        imported_anew = sys.modules.get(self.site.module) not in (None, self.installed[0].module)
        functions = [one for one in gone if not isinstance(one, RebuiltTarget)]
        kept = [one for one in self.installed if one not in gone and one.is_the_modules_own]  # a reload keeps none
        if imported_anew or (functions and not kept and all(one.was_reloaded for one in functions)):
            self.installed, self._earlier = (), self._earlier + self.installed
            self.set(Status.PENDING, _LOADED_SINCE)
            return True
        if gone:
            others = "; ".join(f"{one.target} is now {one.overwritten_by()}" for one in gone)
            self.set(Status.OVERWRITTEN, f"replaced after megapatch: {others}")
        elif self.status is Status.OVERWRITTEN:
            self.set(Status.APPLIED, "in place again")
        return False
