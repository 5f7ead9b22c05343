"""Check the links and anchors of a built site, and that its tables fit a window of 1,280 pixels.

    python tests/check_site.py FOLDER

The builder checks links between the pages' sources; this sees what became of them, links of the theme and of the
API's docstrings included. Cells wrap by the style sheet, code at any letter, so a table is at least as wide as the
longest words of its columns. Uses only the standard library.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

STYLE = "css/site.css"
ROOM = 870  # of 1,280 pixels: without the menu and the margins
LETTER, PADDING = 8, 32  # pixels: of a letter on average, and of a cell


class Page(HTMLParser):
    """The links and anchors of a page, and the widths that its tables have at least, in pixels."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: list[str] = []
        self.tables: list[list[int]] = []
        self._column, self._in_code = -1, False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors += [found[name] for name in ("id", "name") if name in found and (name == "id" or tag == "a")]
        self.links += [found[name] for name in ("href", "src") if name in found]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self._column = -1
        elif tag in ("td", "th") and self.tables:
            self._column += 1
            self._widen(0)
        self._in_code = self._in_code or tag == "code"

    def handle_endtag(self, tag: str) -> None:
        self._in_code = self._in_code and tag != "code"
        if tag == "table":
            self._column = -1

    def handle_data(self, data: str) -> None:
        if self._column >= 0 and not self._in_code:
            self._widen(max(map(len, re.split(r"\s|(?<=-)", data))))

    def _widen(self, letters: int) -> None:
        columns = self.tables[-1]
        columns += [0] * (self._column + 1 - len(columns))
        columns[self._column] = max(columns[self._column], letters * LETTER + PADDING)


def problems(site: Path) -> Iterator[str]:
    """Yield what is wrong with the site, in words."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site} has no pages"
    for path, page in pages.items():
        here = path.relative_to(site)
        if not any(link.partition("?")[0].endswith(STYLE) for link in page.links):
            yield f"{here} is without {STYLE}"
        for anchor in {anchor for anchor in page.anchors if page.anchors.count(anchor) > 1}:
            yield f"{here} has the anchor #{anchor} more than once"
        for columns in page.tables:
            if sum(columns) > ROOM:
                yield f"{here} has a table that is wider than {ROOM} pixels: {columns} for its columns"
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            # 404.html stands for pages at any depth, so its links begin at the root.
            start = site if parts.path.startswith("/") else path.parent
            target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{here} links to {link}, which is not there"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{here} links to {link}, and there is no such anchor"


def main() -> int:
    site = Path(sys.argv[1]).resolve()
    found = list(problems(site))
    for problem in found:
        print(problem, file=sys.stderr)
    print(f"{len(list(site.rglob('*.html')))} pages in {site}: {len(found)} problems")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
