"""The version of megapatch, exactly, and those of packages that are loaded or could be, without importing them.

Versions only word reasons: a Megatron checkout reads like the next release for months. Reading a version runs
neither torch nor git, as importing megatron.core may.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from . import _version
from ._python.finding import find_module

if TYPE_CHECKING:
    from importlib import metadata

PACKAGES = {"megatron-core": "megatron.core", "torch": "torch", "wrapt": "wrapt"}
"""Distribution to the package whose version a report shows."""

TESTED = {"megatron-core": ("0.12", "0.19")}
"""First and last release that the patches are tested with."""

_DISTRIBUTION_OF = {"megatron.core": "megatron-core", "megatron.training": "megatron-core"}


@functools.cache
def exact_version() -> str:
    """Return a version that differs wherever the code of megapatch differs.

    Where ``__version__`` does not name a commit (a source tree, a build without .git or with changes on top of the
    commit), 8 hexadecimal digits of the sources' SHA-256 follow it. They are computed once: that takes 20 ms, and
    each report names the version.
    """
    if not _version.__version__.endswith((".changed", "+source", "+unknown")):
        return _version.__version__
    import hashlib  # 5 ms, and only reports want it

    found = hashlib.sha256()
    package = Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        if path != Path(_version.__file__):  # which a build changes
            found.update(f"{path.relative_to(package).as_posix()}\0".encode())
            found.update(path.read_bytes())
    return f"{_version.__version__}.{found.hexdigest()[:8]}"


def here() -> dict[str, str]:
    """Return the versions of the installed `PACKAGES`, as `version_of` has them."""
    versions = {distribution: version_of(distribution, module) for distribution, module in PACKAGES.items()}
    return {name: version for name, version in versions.items() if version is not None}


def version_of(distribution: str, module: str) -> str | None:
    """Return the version of the package that is loaded, or that an import would find; None where there is none.

    A checkout (on PYTHONPATH, or installed as editable) may stand in front of an installed distribution: then
    its source is read, and ``(source)`` follows the version.
    """
    folder = folder_of(module)
    if folder is None:
        return None
    from importlib import metadata

    try:
        installed = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        installed = None
    if installed and os.path.realpath(str(installed.locate_file(module.replace(".", "/")))) == folder:
        return stated(installed, "Version") or "unknown version"
    return f"{version_in_source(folder) or 'unknown version'} (source)"


def stated(distribution: metadata.Distribution, field: str) -> str | None:
    """Return what an installed distribution states; None if its METADATA is missing or cannot be read."""
    try:
        found = distribution.metadata[field]
    except Exception:  # other versions of Python raise other ones
        return None
    return found if isinstance(found, str) else None


def remark(module: str) -> str:
    """Return a remark for the reason that code of this module is not known: version found, versions tested."""
    for package, distribution in _DISTRIBUTION_OF.items():
        version = version_of(distribution, package) if f"{module}.".startswith(f"{package}.") else None
        if version is not None:
            return f" ({distribution} {version}{_compared(distribution, version)})"
    return ""


def too_old(distribution: str, version: str) -> bool:
    """Return whether the version is older than any that megapatch is tested with; False if it is unreadable."""
    release = _release(version)
    return bool(release) and release < _release(TESTED[distribution][0])


def is_before(release: str, distribution: str, package: str) -> bool:
    """Return whether a distribution, found by its package, is older than a release; False if nobody knows."""
    found = _release(version_of(distribution, PACKAGES.get(distribution) or package) or "")
    return bool(found) and found < _release(release)


def _compared(distribution: str, version: str) -> str:
    first, last = TESTED[distribution]
    if too_old(distribution, version):
        return f" is too old: megapatch is tested with {first} to {last}"
    if _release(version) > _release(last):
        return f" is newer than what megapatch is tested with, {first} to {last}"
    return f"; megapatch is tested with {first} to {last}"


def _release(version: str) -> tuple[int, ...]:
    """Return major and minor number; nothing if the text is not a version."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version.partition(" ")[0]).release[:2]
    except InvalidVersion:
        return ()


def folder_of(module: str) -> str | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        spec = find_module(module)
        file = spec.origin if spec else None
    return os.path.dirname(os.path.realpath(file)) if file else None


def version_in_source(folder: str) -> str | None:
    """Read the version that the package's own files state: Megatron's and NeMo-RL's package_info.py, or
    __version__."""
    for name in ("package_info.py", "version.py", "_version.py", "__init__.py"):
        try:
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                stated = _constants(ast.parse(file.read()))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # the parser's, of deep nesting
            continue
        if all(part in stated for part in ("MAJOR", "MINOR", "PATCH")):
            numbers = f"{stated['MAJOR']}.{stated['MINOR']}.{stated['PATCH']}"
            return f"{numbers}{stated.get('PRE_RELEASE', '')}"
        if "__version__" in stated:
            return str(stated["__version__"])
    return None


def _constants(tree: ast.Module) -> dict[str, object]:
    """Return the names that are bound to a number or text at the top level, with their values."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
