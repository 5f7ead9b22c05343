"""The modules that could be imported, found without importing any of them."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder


def find_module(name: str) -> ModuleSpec | None:
    """Return the spec of a module that an import would find, or None.

    Unlike `importlib.util.find_spec` this never imports a parent package (importing `megatron.training` takes
    seconds and wants a GPU).
    """
    path = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations and list(spec.submodule_search_locations)
        if path is None and depth < len(parts):
            return None
    return spec


def _find_spec(name: str, path: object) -> ModuleSpec | None:
    # Editable installs bring finders of their own. wrapt's imports parents and finds what others find, too; so
    # does that of `megapatch run`.
    # For a folder without __init__ PathFinder asks for its parent in sys.modules, unless the name has none.
    for finder in [PathFinder, *sys.meta_path]:
        known_as = name.rpartition(".")[2] if finder is PathFinder else name
        if type(finder).__module__.startswith(("wrapt", "megapatch", "sitecustomize")):
            continue
        try:
            spec: ModuleSpec | None = finder.find_spec(known_as, path)  # type: ignore[attr-defined]
        except Exception:  # somebody's finder, asked out of turn
            continue
        if spec is not None:
            return spec
    return None
