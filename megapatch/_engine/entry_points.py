"""Patches of other distributions, by the entry-point group ``megapatch.patches``.

The entry's name is the module to watch, its value (``package.module:attribute``) a `Patch` or several, loaded
when that module is. Until then a record of its own stands for it in the report.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..patch import Patch, Site, Status
from .record import Placeholder, never
from .settings import Settings

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

log = logging.getLogger("megapatch")

GROUP = "megapatch.patches"


def entry_points(settings: Settings) -> list[EntryPoint]:
    """Read the entry points of the group, of all distributions that are installed, or in a folder that PYTHONPATH
    names; none where the settings switch them off."""
    if settings.no_entry_points:
        return []
    try:
        folders = _installed_or_named(sys.path)
        if not any(_mentions_group(folder) for folder in folders):
            return []  # reading all metadata properly takes long
        from importlib import metadata

        first = {_normalized(found.name): found for found in reversed(list(metadata.distributions(path=folders)))}
        return [
            entry for found in reversed(first.values()) for entry in found.entry_points if entry.group == GROUP
        ]
    except Exception as error:  # metadata of others, in whatever shape
        log.warning("entry points of %s could not be read: %s: %s", GROUP, type(error).__name__, error)
        return []


def records(settings: Settings) -> Iterator[EntryPointRecord]:
    """Return what stands for each entry point of the group."""
    for entry in entry_points(settings):
        yield EntryPointRecord(entry, settings)


def _installed_or_named(path: list[str]) -> list[str]:
    """Keep the folders of a sys.path where metadata counts.

    These are the folders behind the standard library, where installed distributions are and where a program
    appends, and the folders that PYTHONPATH names. Others in front of the standard library are the script's folder
    or the working directory: Python puts them there by itself, also in the processes of multiprocessing, and
    anything may lie about in them.
    """
    named = {os.path.realpath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder}
    standard_library = os.path.realpath(os.path.dirname(os.__file__))
    kept, behind = [], False
    for folder in path:
        place = os.path.realpath(folder)
        if place in named or (behind and os.path.isabs(folder)):
            kept.append(folder)
        behind = behind or place == standard_library
    return kept


def _normalized(name: str | None) -> str:
    return re.sub("[^a-z0-9]+", "-", (name or "").lower())


class EntryPointRecord(Placeholder):
    """Stands for the patches of an entry point until they are loaded, or for good where that fails.

    In the report it is called ``third_party.`` and the distribution; MEGAPATCH_DISABLE knows it by that name.
    """

    def __init__(self, entry: EntryPoint, settings: Settings) -> None:
        distribution = entry.dist.name if entry.dist else "unknown"
        patch = Patch(
            name=f"third_party.{_normalized(distribution)}",
            doc=f"Patches of {distribution}: {entry.value}, loaded with {entry.name}.",
            upstream="",
            sites=(Site(module=entry.name, diagnose=never),),
        )
        super().__init__(patch, patch.sites[0], settings.switched_off(patch.name))
        self.entry, self.source = entry, self

    def load(self) -> tuple[Patch, ...]:
        if self.status in (Status.DISABLED, Status.FAILED):
            return ()
        try:
            value = self.entry.load()
            patches = (value,) if isinstance(value, Patch) else tuple(value)
            if not patches or not all(isinstance(patch, Patch) for patch in patches):
                raise TypeError(f"{self.entry.value} is {value!r}; expected a megapatch.Patch or a tuple of them")
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.fail(error)
            return ()
        return patches


def _mentions_group(folder: str) -> bool:
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return False
    for name in names:
        if name.endswith((".dist-info", ".egg-info")):
            with contextlib.suppress(OSError), open(os.path.join(folder, name, "entry_points.txt"), "rb") as file:
                if GROUP.encode() in file.read():
                    return True
    return False
