"""Sites of patches: considered, installed, overwritten; several with one search for all holders."""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType

from ..patch import Patch, PatchInfo, Site, Status, Verdict
from .holders import Holder
from .install import find_holders, install, rebind, rollback
from .record import NOT_IMPORTED, Record
from .target import ReplacedTarget

_UNPATCHED_AGAIN = (
    "the module's own code is there again, as after a reload, and is not patched; megapatch.apply() patches it"
)
_RELOADS_KNOWN = 8  # whose replacements a holder may be left with; each takes about 5 KB
_installations = itertools.count(1)


class Phase(enum.Enum):
    """How far a site's targets are."""

    IDLE = "nothing is installed"
    INSTALLING = "some targets may be installed, as during an installation or after a rollback that failed"
    INSTALLED = "all targets are installed, and other holders of the originals still have these"
    BOUND = "all targets are installed, and the holders have the replacements"


class SiteRecord(Record):
    """One site of a patch, and the targets installed there."""

    def __init__(self, patch: Patch, site: Site, switched_off: str | None) -> None:
        super().__init__(patch.name, site.module, (site.module,), switched_off)
        self.patch, self.site, self.paths = patch, site, site.paths
        self.phase = Phase.IDLE
        self.earlier: tuple[ReplacedTarget, ...] = ()  # before a reload; others may still hold their replacements

    def rows(self) -> Iterator[tuple[PatchInfo, str]]:
        yield self.patch, self.site.module

    def _advice(self) -> str:
        if self.status is not Status.REFUSED:
            return ""
        from .advice import advice  # only when something is wrong

        return f"; {advice(self.patch)}"

    # ------------------------------------------------------------------------ consider, then rebind
    def consider(self, module: ModuleType, wait: bool = True) -> bool:
        """Diagnose the loaded module, and install the targets if needed. Return whether `rebind` has to follow.

        Raises only exceptions that end a program, such as KeyboardInterrupt.

        Args:
            wait: whether to wait for another thread that is considering the site. Not where this thread holds an
                import lock which that thread's diagnosis may need.
        """
        if self._is_held_by_this_thread():
            return False  # our own diagnosis has imported something: other sites are considered, not this one
        held = to_rebind = False
        try:
            if held := self.lock.acquire(blocking=wait):  # in here, as Ctrl-C may come right after it
                to_rebind = self._consider(module)
        finally:
            if held:
                self.lock.release()
        return to_rebind

    def _consider(self, module: ModuleType) -> bool:
        if self.off:
            return False
        if self._is_whole() and self._was_reloaded():
            self._forget_reloaded()
        if self._is_whole():
            self._note_overwritten()
        else:
            self._all_or_none(lambda: self._judge_and_install(module))
        return self.phase is Phase.INSTALLED

    def rebind(self, installed: tuple[ReplacedTarget, ...], found: dict[int, list[Holder]]) -> bool:
        """Give the replacements to the other holders of the originals, which were looked for since `consider`.

        Only then the site is applied. Return whether this call has done it.

        Raises only exceptions that end a program, such as KeyboardInterrupt.
        """
        with self.lock:
            # Otherwise another thread has done it, or has restored, and perhaps installed again.
            if not installed or self.installed is not installed or self.phase is not Phase.INSTALLED:
                return False
            self._all_or_none(lambda: self._bind(found))
            return self.status is Status.APPLIED

    def abandon(self, error: BaseException) -> None:
        """Roll back a site that is not applied yet, as `consider` and `rebind` cannot both be done."""
        with self.lock:
            if self.phase is not Phase.BOUND:
                self._all_or_none(functools.partial(_throw, error))

    def _all_or_none(self, change: Callable[[], None]) -> None:
        """Make a change; if anything goes wrong, leave nothing of ours.

        A bug is recorded; Ctrl-C, and the SystemExit of a signal handler, is raised.
        """
        try:
            change()
        except Exception as error:  # a bug of ours must not break the user's import
            self.fail(error)
            try:
                self._rollback()
            except Exception as another:
                self.fail(another)
        except BaseException:
            self._rollback()
            self.set(Status.PENDING, NOT_IMPORTED)
            raise

    def _judge_and_install(self, module: ModuleType) -> None:
        self._rollback()  # the rest of an attempt that failed
        if any(target.at(module) is target.replacement for target in self.earlier):
            self.uninstall_earlier()  # only a part of the module was reloaded
        verdict = self.site.diagnose(module)
        if not isinstance(verdict, Verdict):
            raise TypeError(f"diagnose returned {verdict!r}, not a Verdict")
        self.verdict = verdict
        if verdict.kind.status is Status.APPLIED:
            self.phase, self.installation = Phase.INSTALLING, next(_installations)
            install(self.patch.name, module, self.site, self._note)
            self.phase = Phase.INSTALLED if self.installed else Phase.IDLE
        else:
            reason = verdict.reason
            if verdict.kind.status.needs_attention:
                from .. import _versions  # only when something is wrong

                reason += _versions.remark(self.site.module)
            self.set(verdict.kind.status, reason)

    def _bind(self, found: dict[int, list[Holder]]) -> None:
        rebind(self.installed, found)
        assert self.verdict is not None
        self.set(Status.APPLIED, self.verdict.reason)
        self.phase = Phase.BOUND

    def _note(self, target: ReplacedTarget) -> None:
        self.installed = (*self.installed, target)

    def _rollback(self) -> None:
        """Leave nothing in place; targets that cannot be reverted stay in `installed`, and the error says why."""
        self.phase = Phase.INSTALLING
        try:
            rollback(self.installed)
        finally:
            self.installed = self._in_place()
        self.phase = Phase.IDLE

    def _in_place(self) -> tuple[ReplacedTarget, ...]:
        return tuple(target for target in self.installed if target.is_ours)

    def uninstall_earlier(self) -> None:
        from .afterwards import uninstall

        found = find_holders([(target, target.replacement) for target in self.earlier])
        uninstall(self.earlier, found)  # still known afterwards: others who patched on top may put one back

    def note_restored(self) -> None:
        self.installed, self.phase = (), Phase.IDLE
        super().note_restored()

    def note_not_restored(self, error: BaseException) -> None:
        left = self._in_place()
        if not left:
            self.note_restored()
        elif len(left) < len(self.installed):
            self.phase = Phase.INSTALLING  # the next attempt begins with a rollback of all of them
            self.fail(error)

    # ------------------------------------------------------------------------ changes from outside
    def refresh(self) -> None:
        """Bring the status up to date with changes from outside: replaced, reloaded, not there at all."""
        with self.lock:
            if self.phase is Phase.INSTALLING:
                return  # the status says why
            if not self.installed:
                super().refresh()
            elif self._was_reloaded():
                self._forget_reloaded()
                self.set(Status.MISSED, _UNPATCHED_AGAIN)
            else:
                self._note_overwritten()

    def _is_whole(self) -> bool:
        return self.phase in (Phase.INSTALLED, Phase.BOUND)

    def _was_reloaded(self) -> bool:
        """Return whether the module was loaded again, so that nothing of ours is in it."""
        if sys.modules.get(self.site.module) not in (None, self.installed[0].module):
            return True
        if not (gone := self._gone()):
            return False
        from .afterwards import were_reloaded

        return were_reloaded(self.installed, gone)

    def _forget_reloaded(self) -> None:
        self.earlier = self.earlier[-_RELOADS_KNOWN * len(self.installed) :] + self.installed
        self.installed, self.phase = (), Phase.IDLE

    def _note_overwritten(self) -> None:
        if gone := self._gone():
            from .afterwards import name_of

            others = "; ".join(f"{target.target} is now {name_of(target, target.current)}" for target in gone)
            self.set(Status.OVERWRITTEN, f"replaced after megapatch: {others}")
        elif self.status is Status.OVERWRITTEN:
            self.set(Status.APPLIED, "in place again")

    def _gone(self) -> list[ReplacedTarget]:
        return [target for target in self.installed if not target.is_in_effect]

    def _is_held_by_this_thread(self) -> bool:
        # Private, yet threading.Condition relies on it: CPython 3.10 to 3.14.
        return self.lock._is_owned()  # type: ignore[attr-defined, no-any-return]


def _throw(error: BaseException) -> None:
    raise error


def consider(sites: Iterable[tuple[SiteRecord, ModuleType, bool]]) -> list[SiteRecord]:
    """Consider these sites, then look once for all other holders of the replaced functions.

    Args:
        sites: with their modules, and whether to wait where another thread is considering one.

    Returns:
        The records of those that were applied.
    """
    fresh: list[SiteRecord] = []
    try:
        for record, module, wait in sites:
            fresh.append(record)
            if not record.consider(module, wait):
                fresh.pop()
        seen, places = _search(fresh)
        return [record for record, installed in seen if record.rebind(installed, places)]
    except BaseException as error:  # Ctrl-C, or out of memory: no holder may be left with a different function
        for record in fresh:
            with contextlib.suppress(BaseException):  # this one again
                record.abandon(error)
        if not fresh or not isinstance(error, Exception):
            raise
    return []


def _search(
    fresh: list[SiteRecord],
) -> tuple[list[tuple[SiteRecord, tuple[ReplacedTarget, ...]]], dict[int, list[Holder]]]:
    """Return the targets installed at these sites, and the holders of their originals."""
    # In this order: another thread searches for the targets that it installs meanwhile.
    seen = [(record, record.installed) for record in fresh]
    held = [(target, target.original) for _, installed in seen for target in installed if target.may_be_held]
    return seen, find_holders(held)
