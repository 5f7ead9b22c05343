"""docs/patches.md: every patch, by family, with what it makes right."""

from __future__ import annotations

from megapatch import patches
from megapatch.patch import Patch

from .limits import FAMILIES

INTRODUCTION = """# The patches

Each repairs one upstream defect, and is applied where the loaded code has it. `megapatch explain NAME` prints
symptom, upstream report, seam, limits and cost. `megapatch doctor` shows what became of each in your
environment. Patches marked "changes numbers" may change the numbers of a run that did not crash before.
[Limits](limits.md) says what each does not do, and [Verdicts](verdicts.csv) which release needs which."""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for family, title in FAMILIES.items():
        parts += [f"## {title}", _table([patch for patch in patches.PATCHES if patch.family == family])]
    return "\n\n".join(parts) + "\n"


def _table(of_family: list[Patch]) -> str:
    rows = ["| patch | what it makes right | upstream | changes numbers |", "| --- | --- | --- | --- |"]
    for patch in of_family:
        numbers = "yes" if patch.changes_numbers else "no"
        reported = f"<{patch.upstream}>" if patch.upstream else "not reported"
        rows.append(f"| `{patch.name}` | {patch.summary} | {reported} | {numbers} |")
    return "\n".join(rows)
