"""Verify's results: as a table for people, and as JSON."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._printable import clean, first_line_at_the_margin
from .._reporting.terminal import wrapped
from .._version import exact_version
from ..patches._catalogue import CATALOGUE
from .judge import BAD, DISABLED, NO_CHECK, NOT_HERE, REPAIRED, RIGHT, Row

SCHEMA = 1
"""Version of the JSON layout. It grows when a key is removed or changes its meaning, not when one is added."""

WELL, BAD_FOUND, CANNOT_RUN = 0, 1, 2


@dataclass
class Results:
    """The rows so far, and where they are from.

    Attributes:
        versions: distribution to version.
        device: such as ``CPU`` or the GPU's name.
        backend: of torch.distributed.
        processes: number of ranks.
        rows: the outcome of each check.
        step: the host's seconds in an ordinary step; None if costs were not measured.
        stopped: why it ended before the last check; "" if it did not.
    """

    versions: Mapping[str, str]
    device: str
    backend: str
    processes: int
    rows: list[Row] = field(default_factory=list)
    step: float | None = None
    stopped: str = ""

    @property
    def exit_code(self) -> int:
        if self.stopped or any(row.is_bad for row in self.rows):
            return BAD_FOUND
        return CANNOT_RUN if self._nothing_is_here else WELL

    @property
    def _nothing_is_here(self) -> bool:
        return bool(self.rows) and all(row.outcome == NOT_HERE for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {
            "schema": SCHEMA,
            "versions": {"megapatch": exact_version(), **self.versions},
            "python": platform.python_version(),
            "device": self.device,
            "backend": self.backend,
            "processes": self.processes,
            "step_seconds": self.step,
            "stopped": self.stopped,
            "exit_code": self.exit_code,
            "checks": [row.to_dict() for row in self.rows],
        }

    def text(self, columns: int) -> str:
        """Return the table, the problems, and one sentence on all of it."""
        measured = [f"cost: of a step that takes the host {1000 * self.step:.1f} ms"] if self.step else []
        lines = [*self._head(columns), "", *self._table(), *measured, *self._notes(columns), "", self.sentence()]
        return "\n".join(lines)

    def sentence(self) -> str:
        """Return the overall result, in one sentence."""
        bad = [row.name for row in self.rows if row.outcome in BAD]
        well = sum(row.outcome in (REPAIRED, RIGHT) for row in self.rows)
        if self.stopped:
            went = f"{well} checks went well before, {len(bad)} did not"
            return first_line_at_the_margin(f"not finished: {self.stopped}; {went}")
        if bad:
            return f"NOT WELL: {', '.join(bad)}"
        if self._nothing_is_here:
            names = _families([row.name for row in self.rows])
            return f"nothing was verified: none of what these patches are for is installed: {', '.join(names)}"
        repaired = sum(row.outcome == REPAIRED for row in self.rows)
        off = [row.name for row in self.rows if row.outcome == DISABLED]
        less = f"; switched off: {', '.join(off)}" if off else ""
        defects = "1 defect was" if repaired == 1 else f"{repaired} defects were"
        right = sum(row.outcome == RIGHT for row in self.rows)
        others = "1 other check" if right == 1 else f"{right} other checks"
        checks = f"; {others} went well" if right else ""
        return f"all well: {defects} seen without megapatch and repaired with it{checks}{less}"

    def _head(self, columns: int) -> list[str]:
        versions = {"megapatch": exact_version(), **self.versions, "Python": platform.python_version()}
        text = ", ".join(f"{name} {version}" for name, version in versions.items())
        many = "1 process" if self.processes == 1 else f"{self.processes} processes"
        return wrapped(f"{text}; {many} on {self.device} ({self.backend})", columns)

    def _table(self) -> list[str]:
        shown = [row for row in self.rows if row.outcome not in (NOT_HERE, NO_CHECK)]
        cells = [("check", "outcome", "defect seen", "with megapatch", "numbers", "cost")]
        cells += [
            (
                row.name,
                row.outcome,
                _word(row.seen, "yes", "no"),
                _word(row.repaired, "well", "not well"),
                _numbers(row.difference),
                _cost(row.cost),
            )
            for row in shown
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]

    def _notes(self, columns: int) -> Iterator[str]:
        for row in self.rows:
            if row.outcome not in (REPAIRED, RIGHT, NOT_HERE, NO_CHECK) and row.text:
                lines = clean(row.text).splitlines()
                yield ""
                yield from wrapped(f"{row.name}: {row.outcome}: {lines[0]}", columns)
                yield from (f"    {line}" for line in lines[1:])
        for outcome, what in (
            (NO_CHECK, "in place, without a run of their own"),
            (NOT_HERE, "not here, as it is not installed"),
        ):
            if names := [row.name for row in self.rows if row.outcome == outcome]:
                yield ""
                yield from wrapped(f"{what}: {', '.join(_families(names))}", columns)


def _families(names: list[str]) -> list[str]:
    """Return the names, with a glob for those of a whole family."""
    found = []
    for family, patches in CATALOGUE.items():
        those = [name for name in names if name in patches]
        found += [f"{family}.*"] if len(those) == len(patches) else those
    return found


def _numbers(difference: float | None) -> str:
    if not difference:
        return "-" if difference is None else "equal"
    return f"equal to {difference:.0e}"


def _word(answer: bool | None, yes: str, no: str) -> str:
    return {True: yes, False: no, None: "-"}[answer]


def _cost(cost: tuple[float, float] | None) -> str:
    """Word the seconds that a patch adds to a step, in microseconds."""
    if cost is None:
        return "-"
    seconds, uncertain = cost
    return f"< {1e6 * (max(seconds, 0) + uncertain):.0f} us" if seconds < uncertain else f"{1e6 * seconds:.0f} us"
