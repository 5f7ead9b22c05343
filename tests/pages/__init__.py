"""The generated pages of docs/: limits.md from the patches' docstrings, api.md from the promised names."""

from __future__ import annotations

from pathlib import Path

from . import api, limits

DOCS = Path(__file__).parent.parent.parent / "docs"
GENERATED = {"api.md": api.page, "limits.md": limits.page}
COMMAND = "cd tests && python -m pages"
