"""The status of a site, or of patches that are not loaded yet, and the reason for it."""

from __future__ import annotations

import enum
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from .._version import see
from ..patch import Patch, PatchInfo, Status, Verdict
from . import watch

if TYPE_CHECKING:
    from .target import ReplacedTarget

log = logging.getLogger("megapatch")

NOT_IMPORTED = "not imported yet"
_MISSED = "loaded, and not patched: megapatch did not see its import; megapatch.apply() patches it"


class Off(enum.Enum):
    """Why nothing is done when the module is loaded."""

    BY_SETTINGS = "the environment has switched it off"
    RESTORED = "restored in this process; megapatch.apply() installs it again"
    DUPLICATE = "another patch has the same name"
    SECOND_COPY = "another copy of megapatch is active in this process"


class Record:
    """A status and the reason for it.

    Attributes:
        name: the patch, or a glob for several.
        where: the module, in messages.
        modules: the modules whose import is watched.
        looked_for: whether sys.modules was searched since this was made or allowed again. Until then a loaded
            module is pending, afterwards missed.
        paths: of the targets in their module, as the site has them; none while the patches are not loaded.
        installed: the targets in place.
        installation: how many sites were installed in this process when this one was; a later one may stand on top
            of it, and is restored before it.
    """

    paths: tuple[str, ...] = ()
    installed: tuple[ReplacedTarget, ...] = ()
    installation = 0
    verdict: Verdict | None = None

    def __init__(self, name: str, where: str, modules: tuple[str, ...], switched_off: str | None) -> None:
        self.name, self.where, self.modules = name, where, modules
        self.lock = threading.RLock()
        self.off = Off.BY_SETTINGS if switched_off else None
        self.status = Status.DISABLED if switched_off else Status.PENDING
        self.reason = switched_off or NOT_IMPORTED
        self.looked_for = False
        self.traceback: str | None = None

    def rows(self) -> Iterator[tuple[PatchInfo, str]]:
        """Yield the lines of the report that this is about: a patch, and the module of a site."""
        raise NotImplementedError

    def set(self, status: Status, reason: str, trace: str | None = None) -> None:
        """Record the status; one that needs attention is logged at WARNING, once."""
        is_new = (status, reason) != (self.status, self.reason)
        self.status, self.reason, self.traceback = status, reason, trace
        if is_new and status.needs_attention:
            text = f"{self.name}: {self.where} is {status.value}: {reason}{self._advice()}{see(status.value)}"
            log.warning("%s", f"{text}\n{trace}" if trace else text)

    def _advice(self) -> str:
        """Return the end of a warning, after the reason."""
        return ""

    def fail(self, error: BaseException) -> None:
        """Record an exception that is being handled, with its traceback."""
        self.set(Status.FAILED, f"{type(error).__name__}: {error}", traceback.format_exc())

    def uninstall_earlier(self) -> None:
        """Put back the originals of before a reload; here nothing was replaced."""

    def note_restored(self) -> None:
        """Note that the originals are back, and stay away until `allow_again()`."""
        self.stay_away(Off.RESTORED)

    def note_not_restored(self, error: BaseException) -> None:
        """Note the targets that a restore has left when it raised: as a rule all, none after Ctrl-C at its end."""

    def stay_away(self, why: Off) -> None:
        """Do nothing when the module is loaded."""
        with self.lock:
            if not self.off:
                self.set(Status.DISABLED, why.value)
                self.off = why  # last, as Ctrl-C may come between any two lines

    def allow_again(self) -> None:
        """Take back a restore; patches that the environment has switched off stay off."""
        with self.lock:
            if self.off is Off.RESTORED:
                self.off, self.looked_for = None, False
                self.set(Status.PENDING, NOT_IMPORTED)

    def refresh(self) -> None:
        """Bring the status up to date with the modules: not there at all, being imported, loaded unseen."""
        with self.lock:
            if self.status in (Status.PENDING, Status.NOT_INSTALLED, Status.MISSED):
                self.set(*self._without_a_verdict())

    def _without_a_verdict(self) -> tuple[Status, str]:
        """Return status and reason of a record whose modules were not considered."""
        loaded = [module for name in self.modules if (module := sys.modules.get(name)) is not None]
        if any(watch.half_loaded(module) for module in loaded):
            return Status.PENDING, "its import is under way"
        if loaded and self.looked_for:
            return Status.MISSED, self.reason if self.status is Status.MISSED else _MISSED
        if loaded:
            return Status.PENDING, NOT_IMPORTED
        from .._python import finding  # only a report asks for patches whose modules are not loaded

        if all(finding.find_module(name) is None for name in self.modules):
            return Status.NOT_INSTALLED, "there is no such module to import"
        return Status.PENDING, NOT_IMPORTED


class Unloaded(Record):
    """Patches that are loaded when one of their modules is; once that fails, for good.

    Attributes:
        patches: the facts that are known of them until then.
        names_are_known: whether `patches` has their own names, or one that stands for all of them.
    """

    def __init__(
        self,
        name: str,
        where: str,
        patches: tuple[PatchInfo, ...],
        load: Callable[[], Iterable[Patch]],
        names_are_known: bool,
        switched_off: str | None = None,
    ) -> None:
        modules = dict.fromkeys(module for patch in patches for module in patch.modules)
        super().__init__(name, where, tuple(modules), switched_off)
        self.patches, self.names_are_known, self._load = patches, names_are_known, load

    def rows(self) -> Iterator[tuple[PatchInfo, str]]:
        for patch in self.patches:
            for module in patch.modules:
                yield patch, module

    def load(self) -> tuple[Patch, ...]:
        """Load and return the patches: none if they are off, or if loading fails, which the status then says."""
        if self.off or self.status is Status.FAILED:
            return ()
        try:
            return tuple(self._load())
        except Exception as error:
            self.fail(error)  # must not break the user's import
            return ()
