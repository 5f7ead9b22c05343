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
from collections.abc import Collection, Iterable
from types import ModuleType
from typing import TYPE_CHECKING

from ..errors import MegapatchError, StrictError
from ..patch import NEEDS_ATTENTION, Patch, Status
from ..patches import PATCHES
from . import entry_points, holders, strict, watch
from .install import check_current
from .lookout import lookout
from .record import Record, SiteRecord
from .settings import DISABLE, STRICT, Settings, matching, unknown_name

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from .target import ReplacedTarget

log = logging.getLogger("megapatch")

_TO_COME = (Status.PENDING, Status.MISSED)


class Engine:
    """The patches of one process and what became of them."""

    def __init__(self, patches: Iterable[Patch], settings: Settings, found: Iterable[EntryPoint] = ()) -> None:
        self.settings = settings
        self.records: tuple[Record, ...] = ()
        self._changing_records = threading.Lock()
        self._activating = threading.Lock()
        self._active = False
        self._watched: set[str] = set()
        self._complained: set[str] = set()
        self._applied: list[SiteRecord] = []  # and not announced yet
        for patch in patches:
            self._add(patch)
        for entry in found:
            self.records += (entry_points.EntryPointRecord(entry, settings),)

    @property
    def patches(self) -> tuple[Patch, ...]:
        """All patches in order; placeholders stand for those of third parties that are not loaded yet."""
        return tuple(dict.fromkeys(record.patch for record in self.records))

    def complaints(self) -> list[str]:
        """List what is wrong with the MEGAPATCH_* environment."""
        more_to_come = any(record.status is Status.PENDING for record in self._entries())
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
        """Put back the originals of the named patches (names or globs; all without names) until `apply()`.

        Raises:
            MegapatchError: for an unknown name.
            RestoreError: when someone else has patched a target on top of megapatch; nothing is changed then.
        """
        named = self.named(*names or "*")
        chosen = [record for record in self.records if record.patch.name in named]
        with contextlib.ExitStack() as locks:  # all of them, in order: nothing may change between check and deed
            for record in chosen:
                locks.enter_context(record.lock)
            for record in chosen:
                check_current(record.installed)
            for record in chosen:
                record.restore()

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

    def load_third_parties(self) -> None:
        """Load the patches of all entry points now, whether their targets are imported or not."""
        for record in self._entries():
            self._load(record)

    def after_fork(self) -> None:
        """In a forked child, finish what other threads were doing, as they do not exist there."""
        watch.after_fork()
        self._changing_records, self._activating = threading.Lock(), threading.Lock()
        undone = [record for record in self._sites() if record.after_fork()]
        self._consider((record, watch.loaded(record.site.module)) for record in undone)

    def _entries(self) -> list[entry_points.EntryPointRecord]:
        return [record for record in self.records if isinstance(record, entry_points.EntryPointRecord)]

    def _sites(self) -> list[SiteRecord]:
        return [record for record in self.records if isinstance(record, SiteRecord)]

    def _look(self) -> None:
        for entry in self._entries():
            if watch.loaded(entry.site.module):
                self._load(entry)
        self._consider((record, watch.loaded(record.site.module)) for record in self._sites())
        self._announce()

    def _on_loaded(self, name: str, module: ModuleType) -> None:
        for entry in self._entries():
            if entry.site.module == name:
                self._load(entry)
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
        for entry in self._entries():
            if watch.loaded(entry.site.module, wait=False):
                self._load(entry)
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
            log.info("%s", _what_was_applied(applied))

    def _load(self, entry: entry_points.EntryPointRecord) -> None:
        """Put an entry point's patches in the place of its record; a broken or switched-off one keeps its record.

        No lock is held while it is imported. Of two threads that load it at once, the second changes nothing.
        """
        patches = entry.load()
        with self._changing_records:
            if not patches or entry not in self.records:
                return
            for patch in patches:
                self._add(patch)
            self.records = tuple(record for record in self.records if record is not entry)
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

    def _add(self, patch: Patch) -> None:
        """Add a record for each site; of two patches with one name the first counts."""
        others = [other for other in self.patches if other.name == patch.name]
        if patch in others:
            return
        added = [SiteRecord(patch, site, self.settings.why_disabled(patch.name)) for site in patch.sites]
        self.records += tuple(added)  # all at once: nobody finds half a patch
        if others:
            for record in added:
                record.disabled = "another patch has the same name"
                record.set(Status.FAILED, f"there is another patch called {patch.name}; this one stays off")

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
                strict.keep_out(record.site.module, _not_in_place([record]))
        raise StrictError(_not_in_place(bad))


def _what_was_applied(records: Iterable[SiteRecord]) -> str:
    """Name the patches that have just been applied, and where; the one line that a user looks for in a log."""
    by_module: dict[str, list[str]] = {}
    for record in records:
        name = record.patch.name + " (changes numbers)" * record.patch.changes_numbers
        by_module.setdefault(record.site.module, []).append(name)
    return "megapatch applied " + "; ".join(
        f"{', '.join(names)} to {module}" for module, names in by_module.items()
    )


def _search(
    fresh: list[SiteRecord],
) -> tuple[list[tuple[SiteRecord, tuple[ReplacedTarget, ...]]], dict[int, list[holders.Holder]]]:
    """Return what these have installed, and who holds the originals of that."""
    # In this order: another thread searches for what it installs meanwhile.
    seen = [(record, record.installed) for record in fresh]
    originals = [target.original for _, installed in seen for target in installed if target.may_be_held]
    return seen, holders.find(originals, [path for record in fresh for path in record.site.holders])


def _not_in_place(records: Iterable[Record]) -> str:
    return "; ".join(
        f"{record.patch.name} is {record.status.value} at {record.site.module}: {record.reason} "
        f"({STRICT} makes this an error; {DISABLE}={record.patch.name} does without the patch)"
        for record in records
    )


@functools.cache
def this_process() -> Engine:
    """Return the engine of this process: one, even if `import megapatch` fails at first and is repeated."""
    settings = Settings.from_environment()
    engine = Engine(PATCHES, settings, entry_points.entry_points(settings))
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=engine.after_fork)
    return engine
