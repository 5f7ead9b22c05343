"""Jobs that compute many cells of a grid in one spawn, each of which can fail without the others.

def job(rank, world_size):                  # a generator; it sets up what several cells share
    for layout in LAYOUTS:
        init_parallel(**layout)
        expected = once(reference, layout)
        for case in CASES:
            yield (layout, case), lambda: compare(case, expected())

ranks = run_cells(job, 2)
ranks[0][layout, case]                      # what rank 0 computed, or that cell's own traceback
"""

from __future__ import annotations

import functools
import os
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megapatch.testing import RanksFailed, RanksTimedOut, run_ranks
from rigs.imported import run_with_megatron

FOREVER = timedelta(days=1)  # until the run's own timeout


class CellFailed(AssertionError):
    """The cell raised, did not finish, or was not run; the text says which, with the traceback of each rank."""


class LeftApart(Exception):
    """Not all ranks ended the cell in the same way, so no rank can continue: their collectives would not match."""


class Outcome(NamedTuple):
    """The result of a cell on a rank."""

    cell: Any
    value: Any = None
    failure: str | None = None
    broken: tuple[str, ...] = ()  # names of rules, as the audit found them


class Found:
    """The results of a rank, by cell. Asking for a cell that failed on any rank raises CellFailed."""

    def __init__(self, values, failures, not_run, broken):
        self.values, self.failures, self.not_run = values, failures, not_run
        self.broken = broken  # by cell, the rules that the audit found broken

    def __contains__(self, cell):
        """Whether the job had the cell, or may have had it if it had run to its end."""
        return cell in self.values or cell in self.failures or bool(self.not_run)

    def __getitem__(self, cell):
        __tracebackhide__ = True
        if cell in self.failures:
            raise CellFailed(self.failures[cell])
        if cell not in self.values and self.not_run:
            raise CellFailed(self.not_run)
        return self.values[cell]


def once(function, *args, **kwargs):
    """Return a function that calls `function` when it is first called, and returns that result every time."""
    return functools.cache(functools.partial(function, *args, **kwargs))


DEVICES = {"cpu": {}, "cuda": {"device": "cuda"}}
"""Options of `run_ranks`, by the environment variable CELLS_DEVICE."""

AUDITED = {"MEGAPATCH_AUDIT": "1", "MEGAPATCH_AUDIT_EVERY": "1"}
RAISING = {**AUDITED, "MEGAPATCH_AUDIT": "raise"}
"""For runs that are not made of cells: a finding ends them in the next step."""


def run_cells(job, world_size, *args, patience=10.0, audited=False, megatron=True, **options):
    """Run a job in ranks that yields (cell, function) pairs; return a `Found` for each rank.

    The functions are called one by one. After each, the ranks wait until all have ended it. If all have computed
    it, or all have raised in the same place, the next cell comes. Otherwise the run ends, and the cells that are
    left fail as not run. No collective is needed for that: a rank may be waiting in one.

    job, args   as for `run_ranks`
    patience    seconds that a rank whose cell raised waits for the others to end it
    audited     whether megapatch.audit watches all cells; one in which it finds anything fails, unless its name
                says that it is without a patch
    megatron    whether ranks may have imported Megatron when they begin, which saves each of them time; those with
                a setup have if it is marked (rigs/imported.py)
    options     of `run_ranks`: setup, env, timeout (for all cells)
    """
    error = None
    options = {**DEVICES[os.environ.get("CELLS_DEVICE", "cpu")], **options}
    if audited:
        options["env"] = {**options.get("env", {}), **AUDITED}
    with tempfile.TemporaryDirectory(prefix="megapatch-cells-") as folder:
        try:
            run = run_with_megatron if megatron else run_ranks
            run(_run, world_size, job, args, folder, patience, audited, **options)
        except (RanksFailed, RanksTimedOut) as raised:
            error = raised
        ranks = [_outcomes(folder, rank) for rank in range(world_size)]
    last = max(ranks, key=len)[-1:]
    if error and not last:
        raise error
    cells = dict.fromkeys(outcome.cell for outcomes in ranks for outcome in outcomes)
    failures = {cell: text for cell in cells if (text := _failure(cell, ranks, error))}
    not_run = None
    if error:
        cell = last[0].cell
        failures.setdefault(cell, f"the job failed after cell {cell!r}:\n{error}")
        not_run = f"not run: the ranks were left in different places by cell {cell!r}, or did not get past it"
    return [
        Found(
            {one.cell: one.value for one in outcomes},
            failures,
            not_run,
            {one.cell: one.broken for one in outcomes},
        )
        for outcomes in ranks
    ]


def cells_of(job, world_size, *, folder=None, **options):
    """Return a fixture of a module's tests: what `run_cells` returns, or of one rank its `Found`.

    folder   the name of a folder that the job gets the path of; it is in the one of the fixture `folder`
    """

    @pytest.fixture(scope="module")
    def found(request):
        args = [f"{request.getfixturevalue('folder')}/{folder}"] if folder else []
        ranks = run_cells(job, world_size, *args, **options)
        return ranks if world_size > 1 else ranks[0]

    return found


def _failure(cell, ranks, error):
    """Return what is wrong with a cell, in words; "" if nothing is."""
    lines = []
    for rank, outcomes in enumerate(ranks):
        (outcome,) = [one for one in outcomes if one.cell == cell] or [Outcome(cell, failure="it did not begin")]
        text = outcome.failure
        if text == UNFINISHED:
            text = f"{text}\n{getattr(error, 'waiting', {}).get(rank) or error}"
        lines += [f"rank {rank} of {len(ranks)}: {text}"] if text else []
    return "\n".join([f"cell {cell!r} failed", *lines]) if lines else ""


# ------------------------------------------------------------------------------------------ in the ranks
UNFINISHED = "it did not finish"


def _run(rank, world_size, job, args, folder, patience, audited):
    store = torch.distributed.FileStore(f"{folder}/store", world_size)
    for number, (cell, compute) in enumerate(job(rank, world_size, *args)):
        path = f"{folder}/{rank}-{number:06d}"
        _save(Outcome(cell, failure=UNFINISHED), path)
        ending = "computed"
        try:
            value = compute()
            _save(Outcome(cell, value, broken=_broken(cell) if audited else ()), path)
        except BaseException as error:  # torch's CheckpointException is no Exception
            _save(Outcome(cell, failure=traceback.format_exc()), path)
            ending = _place(error)
        limit = FOREVER if ending == "computed" else timedelta(seconds=patience)
        _go_on_together(
            store, [f"{number} {each}" for each in range(world_size)], rank, f"{cell!r}: {ending}", limit
        )


def _save(outcome, path):
    """Put an outcome in place whole: a rank that is killed while it writes leaves the one before."""
    unfinished = f"{path}.unfinished"
    torch.save(outcome, unfinished)
    os.replace(unfinished, path)


def take_findings():
    """Return what the audit has found since the last time, and noted of rules that most findings are of."""
    from megapatch import audit

    noted = [note for note in audit.notes() if not audit.RULES[note.rule].is_note]
    found = [*audit.findings(), *noted]
    audit.clear()
    return found


def take_rules():
    """Return the names of the rules that the audit has found broken since the last time."""
    return [finding.rule for finding in take_findings()]


def _broken(cell):
    """Return the rules that the audit has found broken in a cell; raise for one that has its patches."""
    found = take_findings()
    wrong = [str(each) for each in found if not each.is_note]
    assert not wrong or "without" in str(cell), "\n".join(["the audit has found:", *wrong])
    return tuple(finding.rule for finding in found)


def _go_on_together(store, keys, rank, ending, limit):
    store.set(keys[rank], ending)
    try:
        store.wait(keys, limit)
    except RuntimeError:  # torch's DistStoreError: it took too long
        raise LeftApart(ending) from None
    endings = [store.get(key).decode() for key in keys]
    if len(set(endings)) > 1:
        raise LeftApart("; ".join(endings))


def _place(error):
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {last.filename}:{last.lineno}"


def _outcomes(folder, rank):
    paths = sorted(Path(folder).glob(f"{rank}-??????"))
    return [torch.load(path, "cpu", weights_only=False) for path in paths]  # our own processes wrote them
