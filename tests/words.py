"""Print the words of the hand-written pages: `python tests/words.py`. The goal for users' pages is 20,000.

A word has a letter or a digit: the marks of a table, a list or a heading are none.

Not counted is what is generated: docs/api.md, docs/limits.md, docs/patches.md, and tables of docs/audit.md and
docs/process-state.md.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
GENERATED = {"api.md", "limits.md", "patches.md"}
TABLE = re.compile(r"<!-- Generated from .*?<!-- the end of what is generated -->", re.DOTALL)
WORD = re.compile(r"\S*\w\S*")
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
MAINTAINERS = {
    "CONTRIBUTING.md",
    "architecture.md",
    "audit-tests.md",
    "benchmark-programs.md",
    "process-state.md",
    "testing.md",
    "writing-a-patch.md",
}
PAGES += [page for page in sorted(ROOT.glob("docs/*.md")) if page.name not in GENERATED]


if __name__ == "__main__":
    words = {page.name: len(WORD.findall(TABLE.sub("", page.read_text()))) for page in PAGES}
    for name, number in sorted(words.items(), key=lambda item: -item[1]):
        print(f"{number:7,} {name}")
    theirs = sum(number for name, number in words.items() if name in MAINTAINERS)
    print(f"{sum(words.values()) - theirs:7,} for users")
    print(f"{theirs:7,} for maintainers")
