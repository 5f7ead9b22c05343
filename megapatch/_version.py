"""The version of megapatch, which a build replaces by that of the commit (see pyproject.toml), and its address."""

from __future__ import annotations

__version__ = "0.1.0+source"

REPOSITORY = "https://github.com/megapatch/megapatch"


def see(entry: str) -> str:
    """Return the end of a WARNING or ERROR in the log: where its entry in docs/troubleshooting.md is.

    Args:
        entry: the anchor of the entry. It has no percent sign, so the end of a format can have it.
    """
    return f" (see {REPOSITORY}/blob/main/docs/troubleshooting.md#{entry})"
