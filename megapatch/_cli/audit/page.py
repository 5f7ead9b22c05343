"""The page of `megapatch audit --html`: one file, without scripts and without anything that is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from ..._printable import clean
from ..._ranks import numbered
from ...audit._summary import Found, Summary
from ...audit._words import advice, happened, happened_before, headline, sentences, titled, values, when
from .picture import picture

_STYLE = """\
:root { color-scheme: light dark; --text: #222; --back: #fff; --line: #ddd; --finding: #c62828; --note: #b26a00; }
@media (prefers-color-scheme: dark) {
  :root { --text: #ddd; --back: #16181c; --line: #3a3d44; --finding: #ff8a80; --note: #ffc168; }
}
body { font: 15px/1.45 sans-serif; color: var(--text); background: var(--back); margin: 0 auto; padding: 16px 24px;
  max-width: 1200px; }
h1 { font-size: 22px; } h2 { font-size: 17px; margin-top: 28px; }
section { border-left: 4px solid var(--line); padding-left: 14px; margin: 22px 0; }
section.finding { border-color: var(--finding); } section.note { border-color: var(--note); }
h2 small { font-weight: normal; }
p, ul, pre { margin: 6px 0; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: 8px 0; }
td, th { border: 1px solid var(--line); padding: 4px 8px; text-align: left; vertical-align: top; }
figure { margin: 16px 0; overflow-x: auto; } svg { max-width: 100%; height: auto; }"""


def page(summary: Summary, unreadable: Iterable[str]) -> str:
    """Return the page.

    Args:
        unreadable: a sentence for each report that is missing or cannot be read.
    """
    body = "\n".join(line for title, attempt in titled(summary) for line in _body(title, attempt, unreadable))
    return f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>megapatch audit: {_shown(headline(summary))}</title>
<style>
{_STYLE}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def _shown(text: str) -> str:
    """Return other people's text as HTML that shows it."""
    return escape(clean(text))


def _body(title: str, summary: Summary, unreadable: Iterable[str]) -> Iterator[str]:
    yield f"<h1>{_shown(title)}</h1>"
    yield _listed([*values(summary), *unreadable])
    yield f"<figure>\n{picture(summary)}</figure>"
    for found in summary.found:
        yield from _section(found)
    if summary.events:
        yield "<h2>events</h2>"
        yield _listed(happened(events) for events in summary.events)
    yield "<h2>rules</h2>"
    yield _table(
        ("rule", "became", "on"),
        (
            (rule, status, numbered("rank", ranks))
            for status, by_rule in summary.rules.items()
            for rule, ranks in by_rule.items()
        ),
    )


def _section(found: Found) -> Iterator[str]:
    kind = "note" if found.is_note else "finding"
    yield f'<section class="{kind}">'
    yield f"<h2>{_shown(found.rule)} <small>{kind}, {_shown(when(found))}</small></h2>"
    for sentence in (*sentences(found), found.means, *happened_before(found)):
        yield f"<p>{_shown(sentence)}</p>"
    if found.where:
        yield f"<pre>{_shown(chr(10).join(f'at {line}' for line in reversed(found.where)))}</pre>"
    if found.causes:
        rows = ((str(number), cause["cause"], cause["check"]) for number, cause in enumerate(found.causes, 1))
        yield _table(("", "likely cause", "what shows it"), rows)
    for line in advice(found):
        yield f"<p>{_shown(line)}</p>"
    yield "</section>"


def _listed(lines: Iterable[str]) -> str:
    return "\n".join(["<ul>", *(f"<li>{_shown(line)}</li>" for line in lines), "</ul>"])


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{_shown(cell)}</th>" for cell in heads)
    body = ("".join(f"<td>{_shown(cell)}</td>" for cell in row) for row in rows)
    return "\n".join(["<table>", f"<tr>{head}</tr>", *(f"<tr>{row}</tr>" for row in body), "</table>"])
