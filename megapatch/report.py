"""Every patch with its status and reason, as a table, as JSON and as one digest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from . import versions
from .install import left_behind
from .patch import Patch, Status
from .site_record import SiteRecord

SCHEMA = 1
"""Version of the JSON layout: it grows when a key goes or changes its meaning, not when one is added."""


class SiteReport(NamedTuple):
    """What became of one site.

    verdict: what its diagnosis found, such as ``needed``; None where it was not asked, or failed.
    targets: those really replaced. rebound: other places that now hold the replacement. out_of_reach: what still
    holds an original and could not be given the replacement, in words.
    """

    module: str
    status: Status
    reason: str
    verdict: str | None
    targets: tuple[str, ...]
    rebound: tuple[str, ...]
    out_of_reach: tuple[str, ...]
    traceback: str | None

    def details(self, alone: bool) -> list[str]:
        """The lines below the patch's own, which tells status and reason of a site that stands alone."""
        return [
            f"at {self.module}" if alone else f"at {self.module}: {self.status.value}, {self.reason}",
            *(f"replaced {target}" for target in self.targets),
            *(f"rebound {name}" for name in self.rebound),
            *(f"out of reach: {text}" for text in self.out_of_reach),
            *(self.traceback or "").splitlines(),
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "status": self.status.value,
            "reason": self.reason,
            "verdict": self.verdict,
            "targets": list(self.targets),
            "rebound": list(self.rebound),
            "out_of_reach": list(self.out_of_reach),
            "traceback": self.traceback,
        }


class PatchReport(NamedTuple):
    """One patch with its sites; its status is the one that most needs attention among its installed sites."""

    patch: Patch
    sites: tuple[SiteReport, ...]

    @property
    def _worst(self) -> SiteReport:
        # In the order of Status not-installed comes last, so that any installed site goes before it.
        order = list(Status)
        return min(self.sites, key=lambda site: order.index(site.status))

    @property
    def status(self) -> Status:
        return self._worst.status

    @property
    def reason(self) -> str:
        return self._worst.reason

    def to_dict(self) -> dict[str, Any]:
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
    """What megapatch did in this process, and why. `print` it for a table."""

    patches: tuple[PatchReport, ...]
    versions: dict[str, str]

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that agree when two processes have the same patches in the same state on the
        same versions; reasons and tracebacks do not count."""
        import hashlib  # 5 ms, and only a report wants it

        facts = [sorted(self.versions.items())] + [
            [one.patch.name, site.module, site.status.value, *site.targets]
            for one in self.patches
            for site in one.sites
        ]
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; the layout is versioned by ``schema``."""
        return {
            "schema": SCHEMA,
            "digest": self.digest,
            "versions": dict(self.versions),
            "patches": [one.to_dict() for one in self.patches],
        }

    def __str__(self) -> str:
        width = max([len("patch"), *(len(one.patch.name) for one in self.patches)])
        lines = [" ".join(f"{name} {version}" for name, version in self.versions.items())]
        lines.append(f"{'patch':{width}}  {'status':13}  reason")
        for one in self.patches:
            numbers = " [changes numbers]" if one.patch.changes_numbers else ""
            lines.append(f"{one.patch.name:{width}}  {one.status.value:13}  {one.reason}{numbers}")
            for site in one.sites:
                lines += [f"{'':{width}}  {'':13}  {text}" for text in site.details(alone=len(one.sites) == 1)]
        lines.append(f"digest {self.digest}")
        return "\n".join(lines)


def make_report(records: Iterable[SiteRecord]) -> Report:
    """The report of these sites as they are now."""
    from . import __version__  # known by now, unlike when this module is imported

    by_patch: dict[str, tuple[Patch, list[SiteReport]]] = {}
    for record in records:
        record.refresh()
        installed = record.installed
        site = SiteReport(
            module=record.site.module,
            status=record.status,
            reason=record.reason,
            verdict=record.verdict.kind.value if record.verdict else None,
            targets=tuple(one.target for one in installed if one.is_in_place),
            rebound=tuple(name for one in installed for name in one.rebound),
            out_of_reach=tuple(left_behind(installed)),
            traceback=record.traceback,
        )
        by_patch.setdefault(record.patch.name, (record.patch, []))[1].append(site)
    return Report(
        patches=tuple(PatchReport(patch, tuple(sites)) for patch, sites in by_patch.values()),
        versions={"megapatch": __version__, **versions.here()},
    )
