"""The report: every patch with its status and reason, as a table, as JSON and as one digest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .. import _versions
from .._engine.left_behind import left_behind
from .._engine.record import Record
from .._printable import clean, clean_data, one_line
from .._versions import exact_version
from ..patch import PatchInfo, Status
from . import foreign
from .terminal import document, width, wrapped

INDENT = 13
"""Columns before names and reasons in the table: the longest status plus two."""


class SiteReport(NamedTuple):
    """One site: its status, why, and the targets in place.

    Attributes:
        module: dotted name of the module.
        status: see `Status`.
        reason: why it has this status, in words.
        verdict: the diagnosis, such as ``needed``; None where it did not run, or failed.
        targets: the targets that are really in place, as ``"module:path"``.
        rebound: other places that now hold the replacement.
        out_of_reach: in words, holders of an original that could not be given the replacement.
        foreign: in words, other patches of its targets.
        traceback: of the failure, where there was one.
    """

    module: str
    status: Status
    reason: str
    verdict: str | None
    targets: tuple[str, ...]
    rebound: tuple[str, ...]
    out_of_reach: tuple[str, ...]
    foreign: tuple[str, ...]
    traceback: str | None

    def details(self) -> Iterator[str]:
        """Yield the lines below the module's name."""
        yield self.reason
        groups: dict[str, list[str]] = {}
        for target in self.targets:
            module, _, path = target.rpartition(":")
            parent, dot, name = path.rpartition(".")
            elsewhere = f"{module}:" if module != self.module else ""
            groups.setdefault(f"{elsewhere}{parent}{dot}", []).append(name)
        for prefix, names in groups.items():
            if len(names) == 1 or not prefix:
                yield f"replaced {prefix}{', '.join(names)}"
            else:
                yield f"replaced in {prefix[:-1]}: {', '.join(names)}"
        yield from (f"rebound {name}" for name in self.rebound)
        yield from (f"foreign: {text}" for text in self.foreign)
        yield from (f"out of reach: {text}" for text in self.out_of_reach)
        yield from clean(self.traceback or "").splitlines()  # before it is cut: a private key has many lines

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        data = self._asdict()
        data["status"] = self.status.value
        return {key: list(value) if isinstance(value, tuple) else value for key, value in data.items()}


class PatchReport(NamedTuple):
    """One patch with its sites. Its status is the one that most needs attention among its installed sites."""

    patch: PatchInfo
    sites: tuple[SiteReport, ...]

    @property
    def _worst(self) -> SiteReport:
        # not-installed is the last Status, so any installed site goes before it.
        order = list(Status)
        return min(self.sites, key=lambda site: order.index(site.status))

    @property
    def status(self) -> Status:
        """The status that most needs attention among those of the sites."""
        return self._worst.status

    @property
    def reason(self) -> str:
        """Why that site has this status, in words."""
        return self._worst.reason

    def lines(self, columns: int) -> list[str]:
        """Return status and name, then each installed site: its module, with the details below."""
        numbers = " (changes numbers)" if self.patch.changes_numbers else ""
        lines = [f"{self.status.value:{INDENT}}{one_line(self.patch.name)}{numbers}"]
        indent = " " * INDENT
        for site in self.sites:
            if site.status is not Status.NOT_INSTALLED:
                status = f": {site.status.value}" if site.status is not self.status else ""
                lines += wrapped(f"{site.module}{status}", columns, indent, indent + "  ")
                for text in site.details():
                    within = len(text) - len(text.lstrip())  # a traceback has levels
                    first = f"{indent}  {' ' * within}"
                    lines += wrapped(text, columns, first, first + "  ")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {
            "name": self.patch.name,
            "family": self.patch.family,
            "status": self.status.value,
            "reason": self.reason,
            "upstream": self.patch.upstream,
            "changes_numbers": self.patch.changes_numbers,
            "targets": [target for site in self.sites for target in site.targets],
            "sites": [site.to_dict() for site in self.sites],
        }


class Report(NamedTuple):
    """The status of every patch in this process, and why. `print` it for a table.

    Attributes:
        patches: one `PatchReport` for each patch, in the catalogue's order.
        versions: the versions of megapatch and of the distributions that it patches.
    """

    patches: tuple[PatchReport, ...]
    versions: dict[str, str]

    @property
    def digest(self) -> str:
        """16 hexadecimal digits, equal in two processes that have the same patches in the same state on the same
        versions.

        megapatch's own version names the commit, or identifies its sources. Of others, reasons, tracebacks and
        commits do not count: a copy of a checkout may lack its .git, and a commit does not show changes on top of
        it. The diagnoses looked at the real code, and the statuses reflect it.
        """
        import hashlib  # 5 ms, and only a report wants it

        facts = [sorted(self.versions.items())] + [
            [patch.patch.name, site.module, site.status.value, *site.targets]
            for patch in self.patches
            for site in patch.sites
        ]
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary, without secrets.

        Returns:
            ``schema`` (the version of this layout), ``digest``, ``versions`` and ``patches``,
            each patch with its ``sites``.
        """
        patches = [patch.to_dict() for patch in self.patches]
        data: dict[str, Any] = clean_data(document(digest=self.digest, versions=self.versions, patches=patches))
        return data

    def table(self, columns: int) -> list[str]:
        """Return the lines of the table, without versions and digest.

        Args:
            columns: the width to wrap at; names and paths that are longer stay whole.

        Returns:
            The lines of each patch; patches that are off, or that have no module here, share lines at the end.
        """
        lines = []
        together: dict[str, list[PatchInfo]] = {}
        for patch in self.patches:
            if patch.status is Status.NOT_INSTALLED:
                together.setdefault(patch.status.value, []).append(patch.patch)
            elif patch.status is Status.DISABLED and not any(site.foreign for site in patch.sites):
                together.setdefault(f"{patch.status.value}, {patch.reason}", []).append(patch.patch)
            else:
                lines += patch.lines(columns)
        for status, patches in sorted(together.items()):
            lines += wrapped(f"{status}: {self.names(patches)}", columns, rest=" " * INDENT)
        return lines

    def names(self, patches: Iterable[PatchInfo]) -> str:
        """Return the names of some patches, with a family such as ``slime.* (3)`` where all of it is among them.

        Args:
            patches: patches of this report.
        """
        families: dict[str, list[str]] = {}
        for patch in patches:
            families.setdefault(patch.family, []).append(patch.name)
        words = []
        for family, names in families.items():
            whole = 1 < len(names) == sum(other.patch.family == family for other in self.patches)
            words += [f"{family}.* ({len(names)})"] if whole else names
        return ", ".join(words)

    def __str__(self) -> str:
        columns = width()
        head = wrapped(", ".join(f"{name} {version}" for name, version in self.versions.items()), columns)
        return "\n".join([*head, *self.table(columns), f"digest {self.digest}"])


def make_report(records: Iterable[Record], searching: bool = True) -> Report:
    """Return the report of these sites as they are now.

    Args:
        records: of sites, and of patches that are not loaded, in order. Each is brought up to date.
        searching: whether to look for holders out of reach and others' patches, which takes a tenth of a second
            and more. The digest does not depend on them.
    """
    records = list(records)
    ours = {id(target.replacement) for record in records for target in record.installed}
    for record in records:
        record.refresh()
    held = left_behind(tuple(target for record in records for target in record.installed)) if searching else {}
    by_patch: dict[str, tuple[PatchInfo, list[SiteReport]]] = {}
    for record in records:
        for patch, module in record.rows():
            site = SiteReport(
                module=module,
                status=record.status,
                reason=record.reason,
                verdict=record.verdict.kind.value if record.verdict else None,
                targets=tuple(target.target for target in record.installed if target.is_in_effect),
                rebound=tuple(name for target in record.installed for name in target.rebound),
                out_of_reach=tuple(text for target in record.installed for text in held.get(target.target, ())),
                foreign=tuple(foreign.patchers(module, record.paths, record.installed, ours)) if searching else (),
                traceback=record.traceback,
            )
            by_patch.setdefault(patch.name, (patch, []))[1].append(site)
    return Report(
        patches=tuple(PatchReport(patch, tuple(sites)) for patch, sites in by_patch.values()),
        versions={"megapatch": exact_version(), **_versions.here()},
    )
