"""docs/audit.md: a section for each rule, and where the audit looks, in a page that people write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megapatch.audit import _PARTS, RULES, Rule
from megapatch.audit._audit import Audit
from megapatch.audit._report import rules_of
from megapatch.audit._rules import Cause
from megapatch.audit._settings import Settings

from .limits import markdown, sections

PAGE = Path(__file__).parent.parent.parent / "docs" / "audit.md"
BEGINS = "<!-- Generated from megapatch/audit: `cd tests && python -m pages` -->\n\n"
ENDS = "\n<!-- the end of what is generated -->\n"


def page() -> str:
    """The whole page, with the rules as they are now."""
    before, _, rest = PAGE.read_text().partition(BEGINS)
    after = rest.partition(ENDS)[2]
    assert after, f"{PAGE.name} lacks what the rules are between"
    return "".join([before, BEGINS, "\n\n".join([*rules(), *parts()]), "\n", ENDS, after])


def rules() -> Iterator[str]:
    """What each rule says, what breaking it means, its likely causes, and the patches for some of them."""
    for name, rule in RULES.items():
        yield f"### {name}"
        yield markdown(rule.says)
        yield f"{_kind(rule)} {markdown(rule.means)}"
        yield "\n".join(map(_cause, rule.causes))
        if rule.patches:
            yield f"Patches: {', '.join(f'`{patch}`' for patch in rule.patches)}"


def _cause(cause: Cause) -> str:
    kinds = "".join(f"`{kind}`: " for kind in cause.kinds)
    return f"- {kinds}{markdown(cause.cause)} (*{markdown(cause.check)}*)"


def _kind(rule: Rule) -> str:
    if rule.is_note:
        return "**Note:**"
    noted = ", ".join(f"`{kind}`" for kind in rule.noted)
    return f"**Finding**, or a note if {noted}:" if noted else "**Finding:**"


def parts() -> Iterator[str]:
    """Where each part of the audit looks for breaches of its rules, and what it does not see."""
    yield "## Where it looks"
    for part in Audit(_PARTS, Settings()).parts:
        if names := rules_of(part):
            yield f"**{', '.join(names)}**"
            for heading in ("Watches", "Limits"):
                for section in sections(part.doc or "", heading):
                    yield f"{heading}: {' '.join(map(markdown, section.paragraphs))}"
