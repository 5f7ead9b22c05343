"""Which distributions are installed and which modules could be imported, without importing any of them."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder


def find_module(name: str) -> ModuleSpec | None:
    """The spec of a module that an import would find, or None; unlike `importlib.util.find_spec` this never
    imports a parent package (importing `megatron.training` takes seconds and wants a GPU)."""
    path = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _find_one(".".join(parts[:depth]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
        if path is None and depth < len(parts):
            return None
    return spec


def _find_one(name: str, path: object) -> ModuleSpec | None:
    # Editable installs bring finders of their own. wrapt's imports parents and finds what others find, too.
    for finder in [PathFinder, *sys.meta_path]:
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is None or type(finder).__module__.startswith("wrapt"):
            continue
        spec: ModuleSpec | None = find_spec(name, path)
        if spec is not None:
            return spec
    return None


def installed(*distributions: str) -> dict[str, str]:
    """The versions of those of the named distributions that are installed, by their metadata."""
    from importlib.metadata import PackageNotFoundError, version  # 10 ms, and only a report wants it

    found = {}
    for distribution in distributions:
        try:
            found[distribution] = version(distribution)
        except PackageNotFoundError:
            continue
    return found
