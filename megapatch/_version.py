"""The version of megapatch: a build puts that of the commit in place of this one, see pyproject.toml."""

from __future__ import annotations

import functools
from pathlib import Path

__version__ = "0.1.0+source"

REPOSITORY = "https://github.com/megapatch/megapatch"


@functools.cache
def exact_version() -> str:
    """Return a version that differs wherever the code of megapatch differs.

    Where ``__version__`` does not name a commit (a source tree, a build without .git or with changes on top of the
    commit), 8 hexadecimal digits of the sources' SHA-256 follow it. They are computed once: that takes 20 ms, and
    each report names the version.
    """
    if not __version__.endswith((".changed", "+source", "+unknown")):
        return __version__
    import hashlib  # 5 ms, and only reports want it

    found = hashlib.sha256()
    package = Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        if path != Path(__file__):  # which a build changes
            found.update(f"{path.relative_to(package).as_posix()}\0".encode())
            found.update(path.read_bytes())
    return f"{__version__}.{found.hexdigest()[:8]}"
