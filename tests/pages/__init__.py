"""The generated files: the catalogue of patches and pages of docs/, from the patches and from the promised names.

Of audit.md one table is generated. Two pages are made with the site only (`site.py`).
"""

from __future__ import annotations

from pathlib import Path

from . import api, audit, catalogue, limits, patches, verdicts

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
GENERATED = {
    "megapatch/patches/_catalogue.py": catalogue.file,
    "docs/api.md": api.page,
    "docs/audit.md": audit.page,
    "docs/limits.md": limits.page,
    "docs/patches.md": patches.page,
}
OF_THE_SITE = {"reference.md": api.reference_page, "verdicts.md": verdicts.page}
COMMAND = "cd tests && python -m pages"
