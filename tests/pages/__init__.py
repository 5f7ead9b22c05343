"""The generated files: the catalogue of patches and pages of docs/, from the patches and from the promised names.

Of audit.md and process-state.md a part is generated. One page is made with the site only (`site.py`).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from megapatch._version import REPOSITORY

from . import api, audit, catalogue, limits, patches, process_state, verdicts

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
GENERATED = {
    "megapatch/patches/_catalogue.py": catalogue.file,
    "docs/api.md": api.page,
    "docs/audit.md": audit.page,
    "docs/limits.md": limits.page,
    "docs/patches.md": patches.page,
    "docs/process-state.md": process_state.page,
    "docs/verdicts.csv": verdicts.rows,
}
OF_THE_SITE = {"verdicts.md": verdicts.page}
SUFFIXES = (".md", ".py", ".cfg", ".toml", ".yml", ".ini", ".html")
COMMAND = "cd tests && python -m pages"
ADDRESS = re.compile(r"https://[\w.-]+(?:/[\w.-]+)+?/megapatch(?![\w-])")


def with_address() -> dict[Path, str]:
    """Return the text, with `REPOSITORY`, of each file in the repository that has another address, as a fork's."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    found = {}
    for path in (ROOT / name for name in listed.stdout.split("\0") if name.endswith(SUFFIXES)):
        text = path.read_text() if path.is_file() else ""
        if (changed := ADDRESS.sub(REPOSITORY, text)) != text:
            found[path] = changed
    return found
