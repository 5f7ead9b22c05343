"""The builder's hook (properdocs.yml) for the pages that are made with the site, and are no files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from properdocs.structure.files import File

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from pages import OF_THE_SITE  # noqa: E402


def on_files(files: Any, config: Any) -> Any:
    """Add the pages."""
    for name, page in OF_THE_SITE.items():
        files.append(File.generated(config, name, content=page()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead to the page of verdicts, where on GitHub the file itself is a table."""
    return markdown.replace("](verdicts.csv)", "](verdicts.md)")
