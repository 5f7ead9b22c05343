"""All mistakes of trainers, by name; `python -m rigs.mistakes.table` prints the table of docs/audit-tests.md."""

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
IN_CI = {*{rule: name for name, mistake in MISTAKES.items() for rule in mistake.finds}.values()}
"""For each rule the last mistake that breaks it, of which there may be fewer. CI has no time for all."""

LATER = (
    "a head replaced after it was wrapped",
    "layers frozen after they were wrapped",
    "weights are loaded on one rank only",
    "weights are loaded on one rank of tensor parallelism",
    "a schedule advances on one rank only",
    "weight decay on one rank only",
    "a rank has more microbatches",
    "ranks read the same data",
    "forward passes without the gather",
    "tensor-parallel ranks drop other elements",
    "stages have one seed",
)
"""Mistakes of which nothing is found by default until ranks are compared."""

ACCUSED = ("reduced in every call, sharded",)
"""Mistakes that get a finding where others, which may be meant, get a note of the same rule."""

SEEN = [name for name, mistake in MISTAKES.items() if mistake.finds]
QUIET: tuple[str, ...] = ()
"""Those of which a log at WARNING says nothing in the first steps of a run."""


def as_markdown() -> str:
    """Return a row a mistake: its kind, its name, and what is found of it."""
    rows = ["| kind | mistake | found |", "| --- | --- | --- |"]
    for kind in KINDS:
        for mistake in MISTAKES.values():
            if mistake.kind == kind:
                found = ", ".join(mistake.finds) or f"nothing: {mistake.why}"
                rows.append(f"| {kind} | {mistake.name} | {found} |")
    return "\n".join(rows) + "\n"


def as_sentences() -> str:
    """Return which mistakes are found only where ranks are compared, and which a log does not name."""
    quiet = f"all but {len(QUIET)} ({'; '.join(QUIET)})" if QUIET else "all"
    return (
        f"All but {len(LATER)} are also found between two such comparisons; these are: {'; '.join(LATER)}. "
        f"With the default settings a log at WARNING names {quiet} within nine steps, and each note once."
    )


if __name__ == "__main__":
    print(as_markdown(), as_sentences(), sep="\n")
