"""docs/audit.md: the table of likely causes, in a page that people write."""

from __future__ import annotations

from pathlib import Path

from megapatch.audit import RULES

from .limits import markdown

PAGE = Path(__file__).parent.parent.parent / "docs" / "audit.md"
BEGINS = "<!-- Generated from megapatch/audit/_rules.py: `cd tests && python -m pages` -->\n\n"
ENDS = "\n<!-- the end of what is generated -->\n"


def page() -> str:
    """The whole page, with the table as it is now."""
    before, _, rest = PAGE.read_text().partition(BEGINS)
    after = rest.partition(ENDS)[2]
    assert after, f"{PAGE.name} lacks what the table is between"
    return "".join([before, BEGINS, causes(), ENDS, after])


def causes() -> str:
    """A row for each cause, in the order in which they are likely."""
    rows = ["| rule | kind | likely cause | what shows it |", "| --- | --- | --- | --- |"]
    for name, rule in RULES.items():
        for cause in rule.causes:
            rows.append(
                f"| {name} | {', '.join(cause.kinds)} | {markdown(cause.cause)} | {markdown(cause.check)} |"
            )
    return "\n".join(rows) + "\n"
