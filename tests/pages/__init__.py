"""The generated pages of docs/: patches.md and limits.md from the patches, api.md from the promised names.

Of audit.md one table is generated. Two pages are made with the site only (`site.py`).
"""

from __future__ import annotations

from pathlib import Path

from . import api, audit, limits, patches, verdicts

DOCS = Path(__file__).parent.parent.parent / "docs"
GENERATED = {"api.md": api.page, "audit.md": audit.page, "limits.md": limits.page, "patches.md": patches.page}
OF_THE_SITE = {"reference.md": api.reference_page, "verdicts.md": verdicts.page}
COMMAND = "cd tests && python -m pages"
