"""docs/process-state.csv, read: a row is an entry, or a pattern for many of them."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from .scan import Entry, scan

FILE = Path(__file__).parent.parent.parent / "docs/process-state.csv"
PACKAGES = {
    "megatron-core": ("megatron.core", "megatron.training"),
    "megatron-bridge": ("megatron.bridge.models.conversion", "megatron.bridge.training", "megatron.bridge.utils"),
    "nemo-rl": ("nemo_rl.models.megatron", "nemo_rl.models.policy"),
    "skyrl": tuple(
        f"skyrl.backends.skyrl_train.{name}.megatron" for name in ("distributed", "patches", "workers")
    ),
    "slime": ("slime.backends.megatron_utils",),
    "miles": ("miles.backends.megatron_utils",),
    "verl": (
        "verl.models.mcore",
        "verl.utils.checkpoint.megatron_checkpoint_manager",
        "verl.utils.megatron",
        "verl.utils.megatron_peft_utils",
        "verl.utils.megatron_utils",
        "verl.workers.engine.megatron",
    ),
    "ms-swift": ("swift.megatron",),
    "areal": ("areal.engine.megatron_engine", "areal.engine.megatron_utils", "areal.models.mcore"),
    "roll": ("mcore_adapter", "roll.distributed.strategy.megatron_strategy", "roll.third_party.megatron"),
}
"""Project to the packages that are read: those that train with Megatron."""
HARMS = ("numbers", "error", "memory", "log", "none")
"""Harm that an entry does, or would do without a patch, the worst first."""
VERDICTS = ("limit", "repaired", "not looked at", "harmless")
ON = " on"


class Row(NamedTuple):
    """A row of the file. `module` and `name` may be patterns, as of file names."""

    project: str
    module: str
    name: str
    kind: str  # of scan.Entry; empty: any
    releases: str  # "FIRST to LAST", or "FIRST on"
    depends_on: str
    key: str
    reset_by: str
    harm: str
    verdict: str
    reason: str

    def covers(self, project: str, entry: Entry) -> bool:
        return (
            self.project == project
            and self.kind in ("", entry.kind)
            and fnmatchcase(entry.module, self.module)
            and fnmatchcase(entry.name, self.name)
        )


def read(text: str) -> list[Row]:
    """Return the file's rows. Raises ValueError for anything else."""
    head, *rows = csv.reader(text.splitlines())
    for row in rows:
        if head != [name.replace("_", " ") for name in Row._fields] or len(row) != len(head):
            raise ValueError(f"process-state.csv: expected the columns {', '.join(Row._fields)}; found {row}")
    return [Row(*row) for row in rows]


def row_of(project: str, entry: Entry, rows: Iterable[Row]) -> Row | None:
    """Return the entry's row, the one with the longest names if several cover it."""
    covering = [row for row in rows if row.covers(project, entry)]
    return max(covering, key=lambda row: len(row.module.strip("*")) + len(row.name.strip("*")), default=None)


def news(project: str, folders: Iterable[Path], rows: list[Row]) -> list[str]:
    """Return, in words, what a release in the folders has and the rows lack, and what it no longer has."""
    entries = [entry for folder in folders for entry in scan(folder, PACKAGES[project])]
    found = {entry[:3]: row_of(project, entry, rows) for entry in entries}
    new = [entry for entry in entries if found[entry[:3]] is None]
    gone = [row for row in rows if row.project == project and row.releases.endswith(ON)]
    return [
        *(f"new: {one.module} {one.name} ({one.kind}, line {one.line}): {', '.join(one.writers)}" for one in new),
        *(f"gone: {row.module} {row.name}" for row in gone if row not in found.values()),
    ]
