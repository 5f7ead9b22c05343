"""The generated pages of docs/: patches.md and limits.md from the patches, api.md from the promised names.

Of audit.md one table is generated.
"""

from __future__ import annotations

from pathlib import Path

from . import api, audit, limits, patches

DOCS = Path(__file__).parent.parent.parent / "docs"
GENERATED = {"api.md": api.page, "audit.md": audit.page, "limits.md": limits.page, "patches.md": patches.page}
COMMAND = "cd tests && python -m pages"
