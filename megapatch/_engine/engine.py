"""Considers each patch once its module is there: settings, diagnosis, installation, record.

No lock is held over an import, and each site has a lock of its own: a thread that is importing a target and
one that calls `apply()` never wait for each other in a circle.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from ..errors import MegapatchError, StrictError
from ..patch import NEEDS_ATTENTION, Patch, Status
from . import entry_points, families, holders, strict, watch
from .install import check_current
from .lookout import lookout
from .record import Placeholder, Record, SiteRecord
from .settings import Settings, matching, unknown_name
from .wording import not_in_place, what_was_applied

if TYPE_CHECKING:
    from .target import ReplacedTarget

log = logging.getLogger("megapatch")

_TO_COME = (Status.PENDING, Status.MISSED)


class Engine:
    """The patches of one process and what became of them."""

    def __init__(
        self, patches: Iterable[Patch], settings: Settings, placeholders: Iterable[Placeholder] = ()
    ) -> None:
        self.settings = settings
        self.records: tuple[Record, ...] = ()
        self._changing_records = threading.Lock()
        self._activating = threading.Lock()
        self._active = False
        self._watched: set[str] = set()
        self._complained: set[str] = set()
        self._applied: list[SiteRecord] = []  # and not announced yet
        self._beneath: tuple[Patch, ...] = ()
        for patch in patches:
            self.records += self._records_of(patch, self.patches)
        self.records += tuple(placeholders)

    @property
    def patches(self) -> tuple[Patch, ...]:
        """All patches in order; placeholders stand for those that are not loaded yet."""
        return tuple(dict.fromkeys(record.patch for record in self.records))

    def complaints(self) -> list[str]:
        """List what is wrong with the MEGAPATCH_* environment."""
        unknown = [record for record in self._placeholders() if not record.names_are_known]
        more_to_come = any(record.status is Status.PENDING for record in unknown)
        return self.settings.complaints([patch.name for patch in self.patches], more_to_come)

    def activate(self) -> None:
        """Watch for every target and patch what is there; a second call only looks again.

        Raises:
            StrictError: with MEGAPATCH_STRICT, when a site needs attention.
        """
        with self._activating:
            first, self._active = not self._active, True
        if first:
            self._complain()
        lookout.call_when_missed(self._on_missed)
        try:
            for record in self.records:
                self._watch(record.site.module)
            self._look()
        finally:  # also where Ctrl-C came between
            self._expect_nothing_more(self.records)
        self._insist(self.records)

    def apply(self) -> None:
        """Consider every site whose module is loaded, restored ones too; what is in place stays as it is.

        Raises:
            StrictError: with MEGAPATCH_STRICT, when a site needs attention.
        """
        for record in self.records:
            record.allow_again()
        self._look()
        self._insist(self.records)

    def restore(self, *names: str) -> None:
        """Put back the originals of the named patches (names or globs) until `apply()`.

        Without names, of all but those that were put beneath.

        Raises:
            MegapatchError: for an unknown name.
            RestoreError: when someone else has patched a target on top of megapatch; nothing is changed then.
        """
        named = self.named(*names or "*")
        self.load_families()  # so that restored ones stay away when their module is imported
        kept = () if names else self._beneath
        self._restore(
            [record for record in self.records if record.patch.name in named and record.patch not in kept]
        )

    def _restore(self, chosen: Collection[Record]) -> None:
        with contextlib.ExitStack() as locks:  # all of them, in order: nothing may change between check and deed
            for record in chosen:
                locks.enter_context(record.lock)
            going = [target for record in chosen for target in record.installed]
            check_current(going, going)
            for record in sorted(chosen, key=lambda record: record.installation, reverse=True):
                record.restore()

    def put_beneath(self, patches: Collection[Patch]) -> None:
        """Add patches that see what is left once all others have had their say, whatever settings say of patches.

        Those in place are taken off for a moment, so nothing of what they patch may run meanwhile.

        Raises:
            RestoreError: when someone else has patched on top of megapatch; nothing is changed then.
        """
        with self._lifted(), self._changing_records:
            added = [SiteRecord(patch, site, None) for patch in patches for site in patch.sites]
            self.records = (*added, *self.records)
            self._beneath += tuple(patches)

    def take_away(self, patches: Collection[Patch]) -> None:
        """Undo `put_beneath`.

        Raises:
            RestoreError: when someone else has patched on top of megapatch; nothing is changed then.
        """
        with self._lifted(), self._changing_records:
            self.records = tuple(record for record in self.records if record.patch not in patches)
            self._beneath = tuple(patch for patch in self._beneath if patch not in patches)

    @contextlib.contextmanager
    def _lifted(self) -> Iterator[None]:
        """Take off what is in place, and put it in again afterwards, in the order of the records."""
        lifted = [record for record in self._sites() if record.installed]
        self._restore(lifted)
        try:
            yield
        finally:
            for record in lifted:
                record.allow_again()
            if self._active:
                for module in [record.site.module for record in self.records]:
                    self._watch(module)
                self._look()
                self._expect_nothing_more(self.records)

    def named(self, *names: str) -> list[str]:
        """Return the names of the patches that these names or globs stand for.

        Raises:
            MegapatchError: for a name that stands for no patch.
        """
        known = [patch.name for patch in self.patches]
        for name in names:
            if not matching(name, known):
                raise MegapatchError(unknown_name(name, known))
        return [patch for patch in known if any(matching(name, [patch]) for name in names)]

    def load_families(self) -> None:
        """Load all of megapatch's own patches now, whether their targets are imported or not."""
        self._load_now(record for record in self._placeholders() if record.names_are_known)

    def load_all(self) -> None:
        """Load all patches now, those of entry points as well."""
        self._load_now(self._placeholders())

    def _load_now(self, placeholders: Iterable[Placeholder]) -> None:
        for record in placeholders:
            self._load(record)
        self._expect_nothing_more(record for record in self._sites() if record.status is Status.PENDING)

    def after_fork(self) -> None:
        """In a forked child, finish what other threads were doing, as they do not exist there."""
        watch.after_fork()
        self._changing_records, self._activating = threading.Lock(), threading.Lock()
        undone = [record for record in self._sites() if record.after_fork()]
        self._consider((record, watch.loaded(record.site.module)) for record in undone)

    def _placeholders(self) -> list[Placeholder]:
        return [record for record in self.records if isinstance(record, Placeholder)]

    def _sites(self) -> list[SiteRecord]:
        return [record for record in self.records if isinstance(record, SiteRecord)]

    def _look(self) -> None:
        for placeholder in self._placeholders():
            if watch.loaded(placeholder.site.module):
                self._load(placeholder)
        self._consider((record, watch.loaded(record.site.module)) for record in self._sites())
        self._announce()

    def _on_loaded(self, name: str, module: ModuleType) -> None:
        for placeholder in self._placeholders():
            if placeholder.site.module == name:
                self._load(placeholder)
        here = [record for record in self._sites() if record.site.module == name]
        # A module that was half-loaded in our own thread gets no event of its own. Do not wait here: this thread
        # holds the import lock of `name`, and a thread that imports the other module may want it.
        late = [record for record in self._sites() if record.status in _TO_COME and record not in here]
        considered: list[tuple[SiteRecord, ModuleType | None]] = [(record, module) for record in here]
        considered += [(record, watch.loaded(record.site.module, wait=False)) for record in late]
        self._consider(considered, late)
        self._announce(name)
        self._insist([record for record in self.records if record in late or record.site.module == name])

    def _on_missed(self) -> None:
        """Patch what was imported behind another import hook. This thread holds an import lock: do not wait."""
        for placeholder in self._placeholders():
            if watch.loaded(placeholder.site.module, wait=False):
                self._load(placeholder)
        late = [(record, watch.loaded(record.site.module, wait=False)) for record in self._sites()]
        late = [(record, module) for record, module in late if module is not None]
        records = [record for record, _ in late]
        self._consider(late, records)
        self._announce()
        self._insist(records)

    def _consider(
        self, found: Iterable[tuple[SiteRecord, ModuleType | None]], late: Collection[SiteRecord] = ()
    ) -> None:
        """Consider these sites, then look for other holders of what was replaced, once for all of them.

        Args:
            late: those not to wait for, where another thread is considering them.
        """
        fresh: list[SiteRecord] = []
        try:
            for record, module in found:
                if module is None:
                    self._expect_nothing_more([record])
                else:
                    fresh.append(record)
                    if not record.consider(module, wait=record not in late):
                        fresh.pop()
            seen, places = _search(fresh)
            self._applied += [record for record, installed in seen if record.rebind(installed, places)]
        except BaseException as error:  # Ctrl-C, or out of memory: no holder may be left with a different function
            if not fresh:
                log.warning("patches could not be considered", exc_info=True)
            for record in fresh:
                with contextlib.suppress(KeyboardInterrupt):
                    record.abandon(error)
            if not isinstance(error, Exception):
                raise

    def _expect_nothing_more(self, records: Iterable[Record]) -> None:
        """Have the report call a module that is loaded from now on, and not considered, missed."""
        for record in records:
            record.is_expected = record.site.module not in self._watched

    def _announce(self, loaded: str | None = None) -> None:
        """Log what was applied, once the outermost target is loaded: one line for a Megatron, whose modules import
        each other.

        Args:
            loaded: the target that has just been loaded, whose spec still says that it is being imported.
        """
        under_way = (watch.half_loaded(sys.modules.get(name)) for name in self._watched if name != loaded)
        if self._applied and not any(under_way):
            applied, self._applied = self._applied, []
            log.info("%s", what_was_applied(applied))

    def _load(self, placeholder: Placeholder) -> None:
        """Put the patches that a placeholder stands for in its place; one that cannot be loaded stays.

        No lock is held while they are imported. Of two threads that load them at once, the second changes nothing.
        """
        patches = placeholder.load()
        with self._changing_records:
            if not patches or placeholder not in self.records:
                return
            same = [r for r in self._placeholders() if r.source == placeholder.source]
            position = self.records.index(same[0])
            others = [record for record in self.records if record not in same]
            added: tuple[Record, ...] = ()
            for patch in patches:
                known = [record.patch for record in (*others, *added)]
                added += self._records_of(patch, known)
            self.records = (*others[:position], *added, *others[position:])  # all at once: nobody finds half
        for patch in patches:
            for site in patch.sites:
                self._watch(site.module)
        self._complain()

    def _complain(self) -> None:
        for complaint in self.complaints():
            what = complaint.partition(";")[0]  # what was meant instead may change as patches are loaded
            if what not in self._complained:
                self._complained.add(what)
                log.warning("%s", complaint)

    def _records_of(self, patch: Patch, known: Collection[Patch]) -> tuple[SiteRecord, ...]:
        """Return a record for each site; of two patches with one name the first counts."""
        if patch in known:
            return ()
        records = tuple(SiteRecord(patch, site, self.settings.why_disabled(patch.name)) for site in patch.sites)
        if any(patch.name == other.name for other in known):
            for record in records:
                record.disabled = "another patch has the same name"
                record.set(Status.FAILED, f"there is another patch called {patch.name}; this one stays off")
        return records

    def _watch(self, name: str) -> None:
        """Watch a module once; again only when that was interrupted."""
        if name not in self._watched:
            watch.watch(name, functools.partial(self._on_loaded, name))
            self._watched.add(name)

    def _insist(self, records: Iterable[Record]) -> None:
        """With MEGAPATCH_STRICT, raise for sites that need attention, now and at every later import of them."""
        bad = [record for record in records if record.status in NEEDS_ATTENTION]
        if not self.settings.strict or not bad:
            return
        for record in bad:
            if record.status not in (Status.OVERWRITTEN, Status.MISSED):  # that module has long been in use
                strict.keep_out(record.site.module, not_in_place([record]))
        raise StrictError(not_in_place(bad))


def _search(
    fresh: list[SiteRecord],
) -> tuple[list[tuple[SiteRecord, tuple[ReplacedTarget, ...]]], dict[int, list[holders.Holder]]]:
    """Return what these have installed, and who holds the originals of that."""
    # In this order: another thread searches for what it installs meanwhile.
    seen = [(record, record.installed) for record in fresh]
    originals = [target.original for _, installed in seen for target in installed if target.may_be_held]
    return seen, holders.find(originals, [path for record in fresh for path in record.site.holders])


@functools.cache
def this_process() -> Engine:
    """Return the engine of this process: one, even if `import megapatch` fails at first and is repeated."""
    settings = Settings.from_environment()
    engine = Engine((), settings, (*families.records(settings), *entry_points.records(settings)))
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=engine.after_fork)
    return engine
