"""Patches of other distributions, by the entry-point group ``megapatch.patches``.

The entry's name is the module to watch, its value (``package.module:attribute``) a `Patch` or several, loaded
when that module is. Until then the report shows the distribution instead.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .._version import see
from ..patch import Patch, PatchInfo
from .record import Unloaded
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

        distributions = list(metadata.distributions(path=folders))
    except Exception as error:  # of a finder
        _warn("the distributions", error)
        return []
    first: dict[str, list[EntryPoint]] = {}  # of two with one name the first on the path counts
    for found in distributions:
        try:
            entries = [entry for entry in found.entry_points if entry.group == GROUP]
            first.setdefault(_normalized(found.name) or f"without a name {len(first)}", entries)
        except Exception as error:  # metadata of others are in whatever shape; a bad one loses no other
            _warn(getattr(found, "_path", None) or "a distribution", error)  # of importlib.metadata's own
    return [entry for entries in first.values() for entry in entries]


def _warn(place: object, error: Exception) -> None:
    log.warning(
        "entry points of %s could not be read in %s: %s: %s" + see("entry-points"),
        GROUP,
        place,
        type(error).__name__,
        error,
    )


def third_parties(settings: Settings) -> Iterator[Unloaded]:
    """Yield a record of each entry point's patches.

    In the report it is called ``third_party.`` and the distribution; MEGAPATCH_DISABLE knows it by that name.
    """
    for entry in entry_points(settings):
        distribution = entry.dist.name if entry.dist else "unknown"
        name = f"third_party.{_normalized(distribution)}"
        doc = f"Patches of {distribution}: {entry.value}, loaded with {entry.name}."
        patches = (PatchInfo(name, doc, None, (entry.name,)),)
        off, load = settings.switched_off(name), functools.partial(_load, entry)
        yield Unloaded(name, entry.name, patches, load, names_are_known=False, switched_off=off)


def _installed_or_named(path: list[Any]) -> list[str]:
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
        if not isinstance(folder, str):  # importlib skips those, too
            continue
        place = os.path.realpath(folder)
        if place in named or (behind and os.path.isabs(folder)):
            kept.append(folder)
        behind = behind or place == standard_library
    return kept


def _normalized(name: str | None) -> str:
    return re.sub("[^a-z0-9]+", "-", (name or "").lower())


def _load(entry: EntryPoint) -> tuple[Patch, ...]:
    value = entry.load()
    patches = (value,) if isinstance(value, Patch) else tuple(value)
    if not patches or not all(isinstance(patch, Patch) for patch in patches):
        raise TypeError(f"{entry.value} is {value!r}; expected a megapatch.Patch or a tuple of them")
    return patches


def _mentions_group(folder: str) -> bool:
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return False
    for name in names:
        if name.endswith((".dist-info", ".egg-info")):
            try:  # unbuffered, and without contextlib: there may be hundreds
                with open(os.path.join(folder, name, "entry_points.txt"), "rb", buffering=0) as file:
                    if GROUP.encode() in file.read():
                        return True
            except OSError:
                pass
    return False
