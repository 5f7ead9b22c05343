"""`pytest -k megatron.rerun-state-dict`: one patch's own tests, and its part of those that go through all patches.

A test that goes through the patches has the marker `every_patch`, and asks `chosen` for those to go through.
"""

from __future__ import annotations

import re
from pathlib import Path

from megapatch.patches._catalogue import CATALOGUE

NAMES = [name for named in CATALOGUE.values() for name in named]
_chosen: set[str] = set()


def choose(expression):
    """Choose the patches that the expression of -k names; all, if it names none."""
    words = re.findall(r"[\w.-]+", expression)
    _chosen.update(name for name in NAMES if name in words and "not" not in words)


def keywords_of(item):
    """Return the patches that a test is about: by the name of its file, its marker or its parameter."""
    if marker := item.get_closest_marker("every_patch"):
        return {name for name in NAMES if not marker.args or name.partition(".")[0] in marker.args}
    patch = getattr(item, "callspec", None) and item.callspec.params.get("patch")
    file, family = Path(item.path).stem, Path(item.path).parent.name
    named = {name for name in CATALOGUE.get(family, ()) if file.startswith(f"test_{_file(name)}")}
    return named | ({patch.name} if hasattr(patch, "name") else set())


def _file(name):
    return name.partition(".")[2].replace("-", "_")


def chosen(patches, name=lambda patch: patch.name):
    """Return those of the patches, or of what has their names, that -k names; all, if it names none."""
    return [each for each in patches if not _chosen or name(each) in _chosen]


def all_are_chosen():
    return not _chosen
