"""Check the links and anchors of a built site.

    python tests/check_site.py FOLDER

The builder checks links between the pages' sources; this sees what became of them, links of the theme and of the
API's docstrings included. Uses only the standard library.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

STYLE = "css/site.css"


class Page(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors += [found[name] for name in ("id", "name") if name in found and (name == "id" or tag == "a")]
        self.links += [found[name] for name in ("href", "src") if name in found]


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
