"""One check: its two runs, without megapatch and with it, and its outcome. And all outcomes, as text and JSON."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .._engine.settings import AUDIT, DISABLE, EVERY, ONLY, STRICT
from .._printable import clean, first_line_at_the_margin
from .._reporting.terminal import COULD_NOT_LOOK, NOT_WELL, WELL, counted, document, table, wrapped
from .._versions import exact_version
from ..errors import RanksFailed, RanksTimedOut
from ..patch import Status
from ..patches._catalogue import CATALOGUE
from .check import CannotRunHere, Check
from .in_ranks import PatchStatus, ScenarioFailed, ScenarioResult, last_line, run_scenario
from .world import World

WITHOUT = {DISABLE: "*", ONLY: "", STRICT: "", AUDIT: ""}
"""Megatron as it is."""
WITH = {STRICT: "", AUDIT: "1", EVERY: "1"}
"""megapatch as the user has set it, and the audit, which compares the ranks in every step."""

REPAIRED, RIGHT, NOT_NEEDED = "repaired", "right", "not needed"
WRONG, NOT_SEEN, NOT_IN_PLACE, UNDECIDED = "WRONG", "NOT SEEN", "NOT IN PLACE", "UNDECIDED"
NOT_HERE, NO_CHECK, CANNOT = "not here", "no check", "cannot run"

BAD = (WRONG, NOT_SEEN, NOT_IN_PLACE, UNDECIDED)
"""Outcomes with which verify exits with 1."""
_WORDS = {Status.NOT_INSTALLED: NOT_HERE, Status.PENDING: CANNOT}
"""Statuses whose outcome has another word."""
UNFINISHED = "it was not finished"
"""Text of a row until there is more to say."""


@dataclass
class Row:
    """The outcome of one check.

    Attributes:
        name: of the patch, or of a feature that megapatch adds.
        outcome: one of the words above.
        seen: whether the defect was met without the patch; None where nobody looked.
        repaired: whether all is well with megapatch; None where nobody looked.
        difference: the largest difference to the reference, with megapatch; None where there are no numbers.
        compares: the two sides of the comparison.
        layouts: in which all was well with megapatch.
        seconds: that the check took.
        text: why, in words.
    """

    name: str
    outcome: str
    seen: bool | None = None
    repaired: bool | None = None
    difference: float | None = None
    compares: str = ""
    layouts: list[str] = field(default_factory=list)
    seconds: float = 0.0
    text: str = ""

    @property
    def is_bad(self) -> bool:
        return self.outcome in BAD


def without_a_run(name: str, patch_status: PatchStatus, has_check: bool) -> Row | None:
    """Return the row of a patch that there is nothing to run for, or None."""
    status, reason = Status(patch_status.status), patch_status.reason
    if status.needs_attention:
        return Row(name, NOT_IN_PLACE, text=f"{status.value}: {reason}")
    if not status.is_well:
        return Row(name, _WORDS.get(status, status.value), text=reason)
    if not has_check:
        if status is Status.NOT_NEEDED:
            return Row(name, NOT_NEEDED, text=reason)
        return Row(name, NO_CHECK, text="it is in place; verify has no run of its own for it")
    return None


def run_check(
    check: Check,
    row: Row,
    world: World,
    patch_status: PatchStatus | None,
    timeout: float,
    say: Callable[[str], None],
) -> None:
    """Run a check without megapatch, if its patch is applied, and with it.

    Args:
        check: the check.
        row: gets the results as soon as they are known.
        world: where to run it.
        patch_status: of its patch; None for a check of a feature that megapatch adds.
        timeout: seconds for each of the two runs.
        say: called with a few words on each run.
    """
    row.compares = check.compares
    started = time.monotonic()
    if patch_status is not None and patch_status.status == Status.APPLIED.value:
        _without(check, world, timeout, row)
        say("defect seen" if row.seen else "defect not seen" if row.seen is False else "undecided")
    _with(check, world, timeout, row)
    if row.outcome != CANNOT:
        row.outcome = _outcome(row, patch_status)
    row.seconds = time.monotonic() - started
    if row.text == UNFINISHED:
        row.text = ""
    if row.outcome == NOT_NEEDED and patch_status is not None:
        row.text = patch_status.reason
    say({True: "well with megapatch", False: "NOT WELL with megapatch", None: CANNOT}[row.repaired])


def _without(check: Check, world: World, timeout: float, row: Row) -> None:
    layouts = check.layouts_of(world.size)
    try:
        world.run(run_scenario, check.name, layouts, env=WITHOUT, timeout=timeout)
    except RanksFailed as error:
        defect = last_line(error, "DefectSeen")
        row.seen = True if defect is not None else None
        row.text = f"without megapatch: {defect or f'the check ended otherwise: {_why(error)}'}"
    except RanksTimedOut as error:
        row.text = f"without megapatch: {error}"
    else:
        row.seen = False


def _with(check: Check, world: World, timeout: float, row: Row) -> None:
    layouts = check.layouts_of(world.size)
    env: Mapping[str, str] = WITH if check.audited else {**WITH, AUDIT: ""}
    try:
        ranks: list[ScenarioResult] = world.run(run_scenario, check.name, layouts, env=env, timeout=timeout)
    except RanksFailed as error:
        if lacking := last_line(error, CannotRunHere.__name__):
            row.outcome, row.text = CANNOT, lacking
            return
        row.repaired = False
        row.text = f"with megapatch: {last_line(error, 'DefectSeen') or _why(error)}"
        return
    except RanksTimedOut as error:
        row.repaired = False
        row.text = f"with megapatch: {error}"
        return
    found = [each for rank in ranks for each in rank.differences.values() if each is not None]
    row.difference = max(found, default=None)
    row.layouts = list(ranks[0].differences)
    findings = list(dict.fromkeys(finding for rank in ranks for finding in rank.findings))
    row.repaired = not findings
    if findings:
        row.text = "the audit has found: " + "; ".join(findings)


def _why(error: RanksFailed) -> str:
    if failure := last_line(error, ScenarioFailed.__name__):
        return failure
    lines = next(iter(error.failures.values())).strip().splitlines()
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]  # it died, and its stacks follow


def _outcome(row: Row, patch_status: PatchStatus | None) -> str:
    if not row.repaired:
        return WRONG
    if patch_status is None:
        return RIGHT
    if patch_status.status == Status.NOT_NEEDED.value:
        return NOT_NEEDED
    return {True: REPAIRED, False: NOT_SEEN, None: UNDECIDED}[row.seen]


# ---------------------------------------------------------------------------------------------- all outcomes
@dataclass
class Results:
    """The rows so far, and where they are from.

    Attributes:
        versions: distribution to version.
        device: such as ``CPU`` or the GPU's name.
        backend: of torch.distributed.
        processes: number of ranks.
        rows: the outcome of each check.
        stopped: why it ended before the last check; "" if it did not.
    """

    versions: Mapping[str, str]
    device: str
    backend: str
    processes: int
    rows: list[Row] = field(default_factory=list)
    stopped: str = ""

    @property
    def exit_code(self) -> int:
        if self.stopped or any(row.is_bad for row in self.rows):
            return NOT_WELL
        return COULD_NOT_LOOK if self._nothing_is_here else WELL

    @property
    def _nothing_is_here(self) -> bool:
        return bool(self.rows) and all(row.outcome == NOT_HERE for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return document(
            versions={"megapatch": exact_version(), **self.versions},
            python=platform.python_version(),
            device=self.device,
            backend=self.backend,
            processes=self.processes,
            step_seconds=None,  # keys of schema 1, as `cost` is: not measured any more
            cost=None,
            stopped=self.stopped,
            exit_code=self.exit_code,
            checks=[{**asdict(row), "cost": None} for row in self.rows],
        )

    def text(self, columns: int) -> str:
        """Return the table, the problems, and one sentence on all of it."""
        body = [*self._table(), *self._notes(columns)]
        return "\n".join([*self._head(columns), "", *body, "", self.sentence()])

    def sentence(self) -> str:
        """Return the overall result, in one sentence."""
        bad = [row.name for row in self.rows if row.outcome in BAD]
        well = sum(row.outcome in (REPAIRED, RIGHT) for row in self.rows)
        if self.stopped:
            went = f"{counted(well, 'check')} went well before, {len(bad)} did not"
            return first_line_at_the_margin(f"not finished: {self.stopped}; {went}")
        if bad:
            return f"NOT WELL: {', '.join(bad)}"
        if self._nothing_is_here:
            names = _families([row.name for row in self.rows])
            return f"nothing was verified: none of what these patches are for is installed: {', '.join(names)}"
        repaired = sum(row.outcome == REPAIRED for row in self.rows)
        off = [row.name for row in self.rows if row.outcome == Status.DISABLED.value]
        less = f"; switched off: {', '.join(off)}" if off else ""
        defects = counted(repaired, "defect was", "defects were")
        others = f"; {counted(well - repaired, 'other check')} went well" if well > repaired else ""
        return f"all well: {defects} seen without megapatch and repaired with it{others}{less}"

    def _head(self, columns: int) -> list[str]:
        versions = {"megapatch": exact_version(), **self.versions, "Python": platform.python_version()}
        text = ", ".join(f"{name} {version}" for name, version in versions.items())
        many = counted(self.processes, "process", "processes")
        return wrapped(f"{text}; {many} on {self.device} ({self.backend})", columns)

    def _table(self) -> list[str]:
        shown = [row for row in self.rows if row.outcome not in (NOT_HERE, NO_CHECK)]
        cells = [("check", "outcome", "defect seen", "with megapatch", "numbers")]
        cells += [
            (
                row.name,
                row.outcome,
                _word(row.seen, "yes", "no"),
                _word(row.repaired, "well", "not well"),
                _numbers(row.difference),
            )
            for row in shown
        ]
        return table(cells)

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
