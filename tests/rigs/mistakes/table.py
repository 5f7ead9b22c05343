"""All mistakes of trainers, by name; `python -m rigs.mistakes.table` prints the table of docs/audit.md."""

from __future__ import annotations

from rigs.mistakes import KINDS, checkpoints, gradients, losses, others, schedules, weights

TABLES = (
    gradients.TABLE,
    losses.TABLE,
    weights.SWAPS,
    checkpoints.LOADS,
    schedules.SCHEDULE,
    others.MODES,
    others.RANKS,
    others.HOOKS,
)
MISTAKES = {mistake.name: mistake for table in TABLES for mistake in table.rows.values()}


def as_markdown() -> str:
    """Return a row a mistake: its kind, its name, and what is found of it."""
    rows = ["| kind | mistake | found |", "| --- | --- | --- |"]
    for kind in KINDS:
        for mistake in MISTAKES.values():
            if mistake.kind == kind:
                found = ", ".join(mistake.finds) or f"nothing: {mistake.why}"
                rows.append(f"| {kind} | {mistake.name} | {found} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
