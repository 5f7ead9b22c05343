"""docs/process-state.md: the rows of docs/process-state.csv that are not harmless, in a page that people write."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from process_state.table import FILE, HARMS, PACKAGES, VERDICTS, Row, read

from megapatch.patches._catalogue import CATALOGUE

PAGE = Path(__file__).parent.parent.parent / "docs" / "process-state.md"
BEGINS = "<!-- Generated from docs/process-state.csv: `cd tests && python -m pages` -->\n\n"
ENDS = "\n<!-- the end of what is generated -->\n"
HEADINGS = {
    "numbers": "Wrong numbers, silently",
    "error": "An error",
    "memory": "Memory or groups that stay",
    "log": "What is logged",
    "none": "No harm known",
}
_NAMES = sorted((re.escape(name) for patches in CATALOGUE.values() for name in patches), key=len, reverse=True)
NAMES = re.compile("|".join(_NAMES))
CODE = re.compile(r"(?<![\w.`])(?=[\w.*]*(?:_|\(\)))[\w.*]+(?:\(\))?")
"""Names with an underscore or parentheses. As code they wrap at any letter, so tables fit."""


def page() -> str:
    """The whole page, with the rows as they are now."""
    before, _, rest = PAGE.read_text().partition(BEGINS)
    after = rest.partition(ENDS)[2]
    assert after, f"{PAGE.name} lacks what the rows are between"
    rows = read(FILE.read_text())
    lines = [*counts(rows), *(line for harm in HARMS for line in table(harm, rows))]
    return "".join([before, BEGINS, "\n".join(lines), "\n", ENDS, after])


def counts(rows: Iterable[Row]) -> Iterable[str]:
    found = Counter((row.project, row.verdict) for row in rows)
    yield f"| rows of | {' | '.join(VERDICTS)} |"
    yield f"| --- |{' --- |' * len(VERDICTS)}"
    for project in PACKAGES:
        yield f"| {project} | {' | '.join(str(found[project, verdict]) for verdict in VERDICTS)} |"
    totals = Counter(verdict for _, verdict in found.elements())
    yield f"| together | {' | '.join(str(totals[verdict]) for verdict in VERDICTS)} |"


def table(harm: str, rows: Iterable[Row]) -> Iterable[str]:
    yield from ("", f"### {HEADINGS[harm]}", "")
    yield "| state | releases | depends on | key | reset by | verdict |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in rows:
        if row.harm != harm or row.verdict == "harmless":
            continue
        reason = NAMES.sub(lambda name: f"`{name[0]}`", row.reason)
        cells = (
            row.releases,
            row.depends_on,
            row.key,
            row.reset_by,
            f"{row.verdict}: {reason}".removesuffix(": "),
        )
        shown = " | ".join(CODE.sub(lambda name: f"`{name[0]}`", cell) for cell in cells)
        yield f"| `{row.module}` `{row.name}` | {shown} |"
