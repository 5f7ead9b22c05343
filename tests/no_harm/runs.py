"""The job of the ranks: each program of a list in each of its layouts, plain or with megapatch."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal
import sys
import warnings
from datetime import timedelta

import torch
from rigs.cells import AUDITED, run_cells, take_rules
from rigs.imported import WITHOUT_MEGAPATCH
from rigs.megatron.options import quick_writer
from way_back import streams
from way_back.pictures import take_logged

from megapatch._mcore.process_groups import process_groups
from megapatch.testing import init_parallel

from . import loads, saves, steps
from .layouts import LAYOUTS
from .table import PROGRAMS
from .trainer import Run

PLAIN, PATCHED, AUDIT = "plain", "with megapatch", "with the audit"
ENVIRONMENTS = {PLAIN: WITHOUT_MEGAPATCH, PATCHED: {}, AUDIT: AUDITED}
ALONE = timedelta(seconds=15)
"""How long a rank waits for the other one in a collective."""
LONGEST = 40
"""Seconds that a program may take."""
FINDINGS = "findings"
MODULES = (steps, loads, saves)


def run(pairs, mode, **env):
    """Return each rank's record by pair, or, of a pair that failed, the text of its failure.

    A program that hangs, or leaves the ranks apart, ends its processes. The others run in new ones.
    """
    found, left = {}, list(pairs)
    while left:
        ranks = run_cells(job, 2, left, timeout=120 + 10 * len(left), env={**ENVIRONMENTS[mode], **env})
        for pair in left:
            if pair in ranks[0].failures:
                found[pair] = ranks[0].failures[pair]
            elif all(pair in rank.values for rank in ranks):
                found[pair] = [rank.values[pair] for rank in ranks]
        left = [pair for pair in left if pair not in found]
    return found


# ------------------------------------------------------------------------------------------ in the ranks
def job(rank, world_size, pairs):
    warnings.simplefilter("ignore", DeprecationWarning)
    signal.signal(signal.SIGALRM, _too_long)
    init_parallel()
    quick_writer()
    folder = os.environ["NO_HARM_FOLDER"]
    if "RIGS_WITHOUT_MEGAPATCH" in os.environ:
        assert not (found := made_by_patches()), found
    for number, pair in enumerate(pairs):
        yield pair, functools.partial(outcome, *pair, rank, f"{folder}/{os.getppid()}-{number}")


def outcome(program, name, rank, folder):
    layout = LAYOUTS[name]
    layout.set_up()
    for group in (None, *process_groups()):
        with contextlib.suppress(ValueError):  # a group that this rank is not in
            torch.distributed.distributed_c10d._set_pg_timeout(ALONE, group)  # there is no public way
    streams.seed()
    take_logged()
    if rank == 0:
        os.makedirs(folder)
    torch.distributed.barrier()
    run = Run(layout, rank, folder)
    signal.alarm(LONGEST)
    try:
        with layout.in_use():
            run.recorded(PROGRAMS[program].function, run)
            found = run.outcome()
    finally:
        signal.alarm(0)
    if "MEGAPATCH_AUDIT" in os.environ:
        found[FINDINGS, ""] = take_rules()
    return found


def _too_long(*_):
    raise TimeoutError(f"the program takes more than {LONGEST} seconds")


def made_by_patches():
    """Return the modules of patches in this process, and the functions in Megatron's modules that are of such."""
    (folder,) = sys.modules["megapatch"].__path__
    found = [name for name in sys.modules if name.startswith("megapatch.patches.") and "_catalogue" not in name]
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron."):
            places = [module, *(value for value in vars(module).values() if isinstance(value, type))]
            functions = [each for place in places for each in vars(place).values() if inspect.isfunction(each)]
            found += [each.__qualname__ for each in functions if f"{folder}/patches" in each.__code__.co_filename]
    return found
