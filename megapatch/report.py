"""Every patch with its status and reason, as a table, as JSON and as one digest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import versions
from .engine import SiteRecord
from .patch import Patch, Status

SCHEMA = 1
DISTRIBUTIONS = ("megatron-core", "torch", "wrapt")


@dataclass(frozen=True)
class SiteReport:
    """What became of one site. targets: those really replaced; rebound: other names that now hold the patch."""

    module: str
    status: Status
    reason: str
    targets: tuple[str, ...]
    rebound: tuple[str, ...]
    traceback: str | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "status": self.status.value,
            "reason": self.reason,
            "targets": list(self.targets),
            "rebound": list(self.rebound),
            "traceback": self.traceback,
        }


@dataclass(frozen=True)
class PatchReport:
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


@dataclass(frozen=True)
class Report:
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
                if len(one.sites) > 1:
                    lines.append(f"{'':{width}}  {site.status.value:13}  {site.module}: {site.reason}")
                lines += [f"{'':{width}}  {'':13}  replaced {target}" for target in site.targets]
                lines += [f"{'':{width}}  {'':13}  rebound {name}" for name in site.rebound]
                lines += ["  " + line for line in (site.traceback or "").splitlines()]
        lines.append(f"digest {self.digest}")
        return "\n".join(lines)


def make_report(records: Iterable[SiteRecord]) -> Report:
    """The report of these sites as they are now."""
    from . import __version__  # known by now, unlike when this module is imported

    by_patch: dict[str, tuple[Patch, list[SiteReport]]] = {}
    for record in records:
        record.refresh()
        site = SiteReport(
            module=record.site.module,
            status=record.status,
            reason=record.reason,
            targets=tuple(one.target for one in record.installed if one.is_in_place),
            rebound=tuple(name for one in record.installed for name in one.rebound),
            traceback=record.traceback,
        )
        by_patch.setdefault(record.patch.name, (record.patch, []))[1].append(site)
    return Report(
        patches=tuple(PatchReport(patch, tuple(sites)) for patch, sites in by_patch.values()),
        versions={"megapatch": __version__, **versions.installed(*DISTRIBUTIONS)},
    )
