"""The environment variables that say whose code is tested; conftest.py has the table of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


def folder_in(variable: str) -> str | None:
    """Return the folder that the variable names, or None. conftest.py has checked that it is of the right kind."""
    return os.environ.get(variable) or None


@dataclass(frozen=True)
class Release:
    """A release, and the folder that would stand on PYTHONPATH."""

    name: str
    folder: str


def releases(framework: str) -> list[Release]:
    """Return those in the folder of the framework's releases, and its checkout, as the variables name them."""
    found = []
    if wheels := folder_in(f"{framework}_RELEASES"):
        found += [Release(path.name, str(path)) for path in sorted(Path(wheels).iterdir())]
    if checkout := folder_in(f"{framework}_CHECKOUT"):
        found.append(Release("checkout", checkout))
    return found
