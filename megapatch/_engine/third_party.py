"""Patches of other distributions, by the entry-point group ``megapatch.patches``.

The entry's name is the module to watch, its value (``package.module:attribute``) a `Patch` or several, loaded
when that module is. Until then the report shows the distribution instead.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
from collections.abc import Iterator
from importlib import metadata

from .._version import see
from ..patch import Patch, PatchInfo
from .entry_points import GROUP, folders_with_metadata
from .record import Unloaded
from .settings import Settings

log = logging.getLogger("megapatch")


def entry_points() -> list[metadata.EntryPoint]:
    """Read the entry points of the group, of all distributions that are installed, or in a folder that PYTHONPATH
    names: where they `may_be_there`."""
    try:
        distributions = list(metadata.distributions(path=folders_with_metadata(sys.path)))
    except Exception as error:  # of a finder
        _warn("the distributions", error)
        return []
    first: dict[str, list[metadata.EntryPoint]] = {}  # of two with one name the first on the path counts
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


def records(settings: Settings) -> Iterator[Unloaded]:
    """Yield a record of each entry point's patches.

    In the report it is called ``third_party.`` and the distribution; MEGAPATCH_DISABLE knows it by that name.
    """
    for entry in entry_points():
        distribution = entry.dist.name if entry.dist else "unknown"
        name = f"third_party.{_normalized(distribution)}"
        doc = f"Patches of {distribution}: {entry.value}, loaded with {entry.name}."
        patches = (PatchInfo(name, doc, None, (entry.name,)),)
        off, load = settings.switched_off(name), functools.partial(_load, entry)
        yield Unloaded(name, entry.name, patches, load, names_are_known=False, switched_off=off)


def _normalized(name: str | None) -> str:
    return re.sub("[^a-z0-9]+", "-", (name or "").lower())


def _load(entry: metadata.EntryPoint) -> tuple[Patch, ...]:
    value = entry.load()
    patches = (value,) if isinstance(value, Patch) else tuple(value)
    if not patches or not all(isinstance(patch, Patch) for patch in patches):
        raise TypeError(f"{entry.value} is {value!r}; expected a megapatch.Patch or a tuple of them")
    return patches
