"""A look for a framework's own hook: whether ranks are alike, in one line; and a file for each rank."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from .._engine.engine import this_process
from .._engine.settings import REPORT
from .._ranks import place
from .._versions import exact_version
from ..errors import InconsistentError
from ..patch import Status
from . import files, terminal
from .facts import Facts, differences, look
from .numbers import numbered
from .report import PatchReport, Report, make_report

_KIND = "rank"
"""The beginning of these files' names."""
_SHAPE = {
    "facts": {str: [str]},
    "report": {"digest": str, "patches": [{"name": str, "status": str, "reason": str}]},
}
"""The keys of these files that are compared, with their types."""

_done: list[str] = []


def check(*ignored: object, **also_ignored: object) -> None:
    """Compare all ranks, once, and print one line on rank 0: version, digest, patches, and who differs in what.

    Takes and ignores any arguments, so that it can be named as a framework's hook, on all ranks: once
    torch.distributed is initialized it is a collective, as `assert_consistent` is. After that a call does nothing.
    With ``MEGAPATCH_REPORT=FOLDER`` each rank also writes a file, for `megapatch doctor FOLDER` to compare.

    Raises:
        InconsistentError: with MEGAPATCH_STRICT, when ranks differ; in any case when one died, or does not come.
    """
    if _done:
        return
    rank, size, initialized = place()
    different, failed = None, None
    if initialized:
        from .agreement import differing

        _done.append("compared")
        try:
            different = differing() if size > 1 else None
        except InconsistentError as error:
            different, failed = str(error), error
        ranks = terminal.counted(size, "rank")
        said = f"NOT ALIKE on {ranks}: {different}" if different else f"alike on {ranks}"
    else:
        said = "ranks are not compared, as torch.distributed is not initialized" if size > 1 else ""
    engine = this_process()
    engine.load_families()
    report = make_report(engine.records)
    if folder := os.environ.get(REPORT):
        write_file(Path(folder), report, rank, size)
    if rank == 0:
        terminal.note("; ".join(filter(None, [_line(report), said])))
    if failed:
        raise failed
    if different and engine.settings.strict:
        raise InconsistentError(f"megapatch is not the same on all ranks: {different}")


def _line(report: Report) -> str:
    patches = [patch for patch in report.patches if patch.patch.family != "audit"]  # whose sites repair nothing
    applied = sum(patch.status is Status.APPLIED for patch in patches)
    bad = [patch.patch.name for patch in report.patches if patch.status.needs_attention]
    lacking = f", NOT in place: {', '.join(bad)}" if bad else ""
    early = "" if bad else _why_none(patches)
    patches_applied = f"{terminal.counted(applied, 'patch', 'patches')} applied" if applied else "no patch applied"
    return f"megapatch {exact_version()}, digest {report.digest}: {patches_applied}{early}{lacking}"


def _why_none(patches: Collection[PatchReport]) -> str:
    """Return the end of the sentence that no patch is applied: why all are off, or that it was too early."""
    sites = [site for patch in patches for site in patch.sites if site.status is not Status.NOT_INSTALLED]
    if any(site.verdict is not None for site in sites):
        return ""
    off = {site.reason if site.status is Status.DISABLED else "" for site in sites}
    return f": {min(off)}" if off and all(off) else " as yet: call check() when Megatron has been imported"


# -------------------------------------------------------------------------------------- a file a rank
def write_file(folder: Path, report: Report, rank: int, size: int) -> None:
    """Write a rank's findings; if that fails, note it and let training continue."""
    place_of_it = {"rank": rank, "size": size, "began": round(time.time(), 3), **files.process()}
    try:
        data = terminal.document(**place_of_it, facts=look(), report=report.to_dict())
        files.write_own(folder, _KIND, rank, data)
    except OSError as error:
        terminal.note(f"megapatch: {REPORT}={folder}: rank {rank} cannot write there: {error.strerror}")


class Compared(NamedTuple):
    """The files of a run's ranks: the facts that they share, in words, and what is wrong.

    Attributes:
        common: how many ranks there are, and the digests.
        differing: the differences, with the ranks.
        not_in_place: the patches that failed, or were refused, missed or overwritten, with the ranks.
        unreadable: the files that could not be read, and the ranks without one.
    """

    common: list[str]
    differing: list[str]
    not_in_place: list[str]
    unreadable: list[str]


def compare_files(folder: Path) -> Compared:
    """Read and compare the files of all ranks: of each attempt by itself, if a job was restarted."""
    attempts, unreadable = files.read_attempts(folder, _KIND, _read)
    compared = Compared([], [], [], unreadable)
    for number, attempt in enumerate(attempts, 1):
        said = f"attempt {number} of {len(attempts)}, {attempt[0]['when']}: " if attempts[1:] else ""
        for sentences, those in zip(compared, _compare(folder, attempt), strict=True):
            sentences += [f"{said}{sentence}" for sentence in those]
    return compared


def _compare(folder: Path, reports: list[dict[str, Any]]) -> Compared:
    ranks = {report["rank"]: report for report in reports}
    digests: dict[str, list[int]] = {}
    bad: dict[str, list[int]] = {}
    for rank, report in sorted(ranks.items()):
        digests.setdefault(report["digest"], []).append(rank)
        for what in report["lacking"]:
            bad.setdefault(what, []).append(rank)
    numbers = sorted(ranks)
    return Compared(
        common=[
            f"{terminal.counted(len(ranks), 'rank')} in {folder}",
            *(f"digest {digest} on {numbered('rank', members)}" for digest, members in digests.items()),
        ],
        differing=differences(
            [ranks[number]["facts"] for number in numbers],
            lambda members: numbered("rank", [numbers[member] for member in members]),
        ),
        not_in_place=[f"{what} on {numbered('rank', members)}" for what, members in bad.items()],
        unreadable=[],
    )


def _read(data: dict[str, Any]) -> dict[str, Any]:
    """Return a file's data with facts, digest, time and patches that are not in place; raise if it lacks them."""
    files.expect(data, _SHAPE)
    facts: Facts = {"number of ranks": (str(data["size"]), "")}  # files of another run would be of another
    facts |= {name: (value, why) for name, (value, why) in data["facts"].items()}
    lacking = [
        f"{patch['name']} is {patch['status']} ({patch['reason']})"
        for patch in data["report"]["patches"]
        if Status(patch["status"]).needs_attention
    ]
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(data.get("began", 0)))
    return {**data, "when": when, "facts": facts, "digest": data["report"]["digest"], "lacking": lacking}
