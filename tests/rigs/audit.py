"""The audit as tests look at it: its findings, its parts, and one that watches nothing by itself."""

from types import SimpleNamespace

from megapatch import audit
from megapatch._engine.record import Unloaded
from megapatch.audit._audit import Audit
from megapatch.audit._settings import Settings


class Thing(SimpleNamespace):
    """Stands in for an object of Megatron's: unlike its base it takes weak references, as those do."""


def found():
    """Return (rule, what) of each finding, and of notes of rules that are not notes only."""
    noted = [note for note in audit.notes() if not audit.RULES[note.rule].is_note]
    return [(each.rule, each.what) for each in (*audit.findings(), *noted)]


def idle_audit():
    """Return an audit that is not installed: it sees only what a test shows it."""
    return Audit(audit._PARTS, Settings())


def running_audit():
    """Return the audit that watches this process."""
    return audit._PROCESS.audit


def part_of(of, kind):
    """Return the part of an audit that is of this class."""
    (part,) = [part for part in of.parts if type(part) is kind]
    return part


def watcher_of(part, path):
    """Return the watcher of a function: it takes the original, and returns the one that is installed."""
    return next(site.replace[path] for site in part.sites() if path in site.replace)


def patches_of(of):
    """Return the patches of an audit, those that are loaded with a family as well."""
    return [
        loaded for patch in of.patches for loaded in (patch.load() if isinstance(patch, Unloaded) else (patch,))
    ]


WATCHERS = patches_of(idle_audit())
"""The sites of an audit, for tests that only read them."""
