"""The version of megapatch: a build puts that of the commit in place of this one, see pyproject.toml."""

from __future__ import annotations

__version__ = "0.1.0+source"

REPOSITORY = "https://github.com/megapatch/megapatch"
