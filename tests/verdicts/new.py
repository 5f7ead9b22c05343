"""Releases that the package index has and releases.txt lacks, and what the diagnoses say of them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable

from packaging.version import Version

from . import table
from .releases import PIP_OPTIONS, Release


class NoAnswer(Exception):
    """The index did not tell a project's releases; the text says what pip said."""


def on_index(project: str) -> list[Version]:
    """Return a project's final releases, from whatever index pip is configured for.

    Raises NoAnswer if pip cannot tell.
    """
    command = [sys.executable, "-m", "pip", "index", "versions", "--ignore-requires-python", project]
    command += PIP_OPTIONS.get(project, [])
    asked = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r"^Available versions: (.*)$", asked.stdout, flags=re.MULTILINE)
    if not found:
        raise NoAnswer(f"{project}: {' '.join(asked.stderr.split())[-300:] or 'pip told no versions'}")
    versions = map(Version, found[1].split(", "))
    return sorted(version for version in versions if not version.is_prerelease)


def missing(known: Iterable[Release], index: Callable[[str], list[Version]] = on_index) -> list[Release]:
    """Return the releases that `known` lacks, to be imported with what the newest of their project is.

    Of a minor release the table has the last patch release, and it begins somewhere: so those are missing that
    are newer than all that it has of their minor release, and of minor releases since the first in the table.
    """
    wheels: dict[str, list[Release]] = {}
    for release in known:
        if release.is_wheel:
            wheels.setdefault(release.project, []).append(release)
    found = []
    for project, releases in wheels.items():
        newest = max(releases, key=lambda release: Version(release.name))
        versions = [Version(release.name) for release in releases]
        for version in _last_of_each_minor(index(project)):
            same_minor = [one for one in versions if one.release[:2] == version.release[:2]]
            if version > min(versions) and all(version > one for one in same_minor) and version not in versions:
                found.append(Release(project, str(version), newest.beside))
    return found


def _last_of_each_minor(versions: Iterable[Version]) -> list[Version]:
    return list({version.release[:2]: version for version in sorted(versions)}.values())


def differences(
    release: Release, looked: dict[tuple[str, str], table.Cell], known: list[Release], told: table.Verdicts
) -> list[str]:
    """Return in words where the verdicts differ from those of the project's release before it in the table."""
    before = _before(release, known)
    found = []
    for (patch, module), cell in sorted(looked.items()):
        old = told.get((patch, module), {}).get(before.name)
        if old is None or old.verdict != cell.verdict:
            was = f"{old.verdict} in {before.name}" if old else f"not in the table for {before.name}"
            found.append(f"{patch} at {module}: {cell.verdict} ({cell.reason}); {was}")
    return found


def _before(release: Release, known: list[Release]) -> Release:
    wheels = [one for one in known if one.project == release.project and one.is_wheel]
    older = [one for one in wheels if Version(one.name) < Version(release.name)]
    return max(older or wheels, key=lambda one: Version(one.name))
