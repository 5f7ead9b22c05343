"""One check: run it without megapatch and with it, and name the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .._engine.record import NEEDS_ATTENTION
from .._engine.settings import AUDIT, DISABLE, EVERY, ONLY, STRICT
from ..errors import RanksFailed, RanksTimedOut
from ..patch import Status
from .check import CannotRunHere, Check
from .in_ranks import PatchStatus, ScenarioFailed, ScenarioResult, last_line, run_scenario
from .world import World

WITHOUT = {DISABLE: "*", ONLY: "", STRICT: "", AUDIT: ""}
"""Megatron as it is."""
WITH = {STRICT: "", AUDIT: "1", EVERY: "1"}
"""megapatch as the user has set it, and the audit, which compares the ranks in every step."""

REPAIRED, RIGHT, NOT_NEEDED = "repaired", "right", "not needed"
WRONG, NOT_SEEN, NOT_IN_PLACE, UNDECIDED = "WRONG", "NOT SEEN", "NOT IN PLACE", "UNDECIDED"
DISABLED, UNSUPPORTED, NOT_HERE, NO_CHECK, CANNOT = "disabled", "unsupported", "not here", "no check", "cannot run"

BAD = (WRONG, NOT_SEEN, NOT_IN_PLACE, UNDECIDED)
"""Outcomes with which verify exits with 1."""
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
        cost: host seconds that the patch adds to an ordinary step, and their uncertainty; None where not measured.
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
    cost: tuple[float, float] | None = None
    seconds: float = 0.0
    text: str = ""

    @property
    def is_bad(self) -> bool:
        return self.outcome in BAD

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def without_a_run(name: str, patch_status: PatchStatus, has_check: bool) -> Row | None:
    """Return the row of a patch that there is nothing to run for, or None."""
    status, reason = Status(patch_status.status), patch_status.reason
    if status is Status.NOT_INSTALLED:
        return Row(name, NOT_HERE, text=reason)
    if status in NEEDS_ATTENTION:
        return Row(name, NOT_IN_PLACE, text=f"{status.value}: {reason}")
    if status is Status.DISABLED:
        return Row(name, DISABLED, text=reason)
    if status is Status.UNSUPPORTED:
        return Row(name, UNSUPPORTED, text=reason)
    if status is Status.PENDING:
        return Row(name, CANNOT, text=reason)
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
