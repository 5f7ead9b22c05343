"""The version of megapatch in reports, which differs wherever the code does."""

from __future__ import annotations

import functools
from pathlib import Path

from . import _version


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
