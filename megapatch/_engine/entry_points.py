"""Looks whether another distribution brings patches, by its file of entry points: most bring none."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .settings import Settings

GROUP = "megapatch.patches"


def may_be_there(settings: Settings) -> bool:
    """Return whether patches of other distributions may come, and a file of entry points mentions their group.

    Reading all metadata properly takes long.
    """
    if settings.no_entry_points:
        return False
    try:
        return any(map(_mentions_group, folders_with_metadata(sys.path)))
    except Exception:
        return True  # reading meets it, too, and logs it


def folders_with_metadata(path: list[Any]) -> list[str]:
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
