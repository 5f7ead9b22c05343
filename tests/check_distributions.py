"""Checks what is in the sdist and the wheel of a folder; run by tox's build environment."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUTSIDE = [
    "LICENSE",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "MANIFEST.in",
    "properdocs.yml",
    "pyproject.toml",
    "RELEASING.md",
    "ruff.toml",
    "setup.cfg",
    "setup.py",
    "tox.ini",
]


def files_below(*folders: str) -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def compare(what: str, found: set[str], expected: set[str]) -> bool:
    for name in sorted(expected - found):
        print(f"{what} lacks {name}")
    for name in sorted(found - expected):
        print(f"{what} should not hold {name}")
    return found == expected


def main(folder: str) -> bool:
    (wheel,) = Path(folder).glob("*.whl")
    (sdist,) = Path(folder).glob("*.tar.gz")
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        files = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    in_sdist = {name for name in files - {"PKG-INFO"} if ".egg-info/" not in name}
    package = files_below("megapatch")
    others = files_below("docs", "examples", "tests", "benchmarks") | set(OUTSIDE)
    wheel_is_right = compare(wheel.name, in_wheel, package)
    return compare(sdist.name, in_sdist, package | others) and wheel_is_right


if __name__ == "__main__":
    sys.exit(0 if main(*sys.argv[1:]) else 1)
