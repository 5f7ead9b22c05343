"""The job of the ranks: each program of a list in each of its layouts, plain or with megapatch."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
import warnings
from datetime import timedelta

import torch
from rigs.cells import AUDITED, run_cells, take_findings
from rigs.imported import WITHOUT_MEGAPATCH
from rigs.megatron.options import quick_writer
from torch.utils._pytree import tree_flatten
from way_back import streams
from way_back.pictures import take_logged
from way_back.ranks import set_up as set_up_alone

from megapatch.testing import init_parallel

from . import by_hand, loads, others, own_classes, saves, steps
from .layouts import LAYOUTS
from .table import LONGEST, PROGRAMS
from .trainer import Run

PLAIN, PATCHED, WATCHED = "plain", "with megapatch", "with the audit"
ENVIRONMENTS = {PLAIN: WITHOUT_MEGAPATCH, PATCHED: {}, WATCHED: AUDITED}
MODULES = (steps, loads, saves, by_hand, own_classes, others)


def run(pairs, mode, folder, *args, of=None, **env):
    """Return each rank's record by pair, or, of a pair that failed, the text of its failure.

    folder   for checkpoints; it is new
    of       another job than this module's, with its further arguments

    A program that hangs, or leaves the ranks apart, ends its processes. The others run in new ones.
    """
    found, left = {}, list(pairs)
    while left:
        saves = f"{folder}/{len(left)}"
        ranks = run_cells(
            of or job, 2, left, saves, *args, timeout=600 + 10 * len(left), env={**ENVIRONMENTS[mode], **env}
        )
        for pair in left:
            if pair in ranks[0].failures:
                found[pair] = ranks[0].failures[pair]
            elif all(pair in rank.values for rank in ranks):
                found[pair] = [rank.values[pair] for rank in ranks]
        left = [pair for pair in left if pair not in found]
    return found


# ------------------------------------------------------------------------------------------ in the ranks
def job(rank, world_size, pairs, folder):
    warnings.simplefilter("ignore", DeprecationWarning)
    signal.signal(signal.SIGALRM, _too_long)
    # Fills what torch.empty() returns: Megatron saves gaps of its buckets that nothing has written.
    torch.use_deterministic_algorithms(True, warn_only=True)
    init_parallel()
    quick_writer()
    collectives = recorded_collectives()
    found = made_by_patches()
    assert bool(found) == ("RIGS_WITHOUT_MEGAPATCH" not in os.environ), found
    for name in dict.fromkeys(layout for _, layout in pairs):
        set_up(LAYOUTS[name])
        for number, pair in enumerate(pairs):
            if pair[1] == name:
                yield pair, functools.partial(outcome, *pair, rank, f"{folder}/{number}", collectives)


set_up = functools.partial(set_up_alone, alone=timedelta(seconds=15))


def outcome(program, name, rank, folder, collectives):
    layout = LAYOUTS[name]
    streams.seed()
    take_logged()
    if rank == 0:
        os.makedirs(folder)
    torch.distributed.barrier()
    run = Run(layout, rank, folder)
    collectives.clear()
    signal.alarm(LONGEST)
    try:
        with layout.in_use():
            PROGRAMS[program].function(run)
            found = {("collectives", "all"): list(collectives), **run.outcome()}
    finally:
        signal.alarm(0)
        findings = take_findings() if "MEGAPATCH_AUDIT" in os.environ else []
    return {**found, ("findings", "all"): [str(each) for each in findings if not each.is_note]}


COLLECTIVES = (
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather"),
    *("recv", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_tensor_coalesced"),
    *("_reduce_scatter_base", "scatter", "send"),
)
"""The methods of a process group by which torch.distributed makes collectives and sends messages."""


def recorded_collectives():
    """Return a list to which each collective from now on is added: kind, ranks and shapes."""
    found = []

    def recorded(name, method):
        @functools.wraps(method)
        def recording(group, *args, **kwargs):
            tensors = tree_flatten((args, kwargs))[0]
            shapes = [tuple(each.shape) for each in tensors if torch.is_tensor(each)]
            ranks = torch.distributed.get_process_group_ranks(group)
            found.append(f"{name} among {ranks} of {shapes}")  # a record of many small objects takes long to save
            return method(group, *args, **kwargs)

        return recording

    group = torch.distributed.ProcessGroup
    for name in COLLECTIVES:
        setattr(group, name, recorded(name, getattr(group, name)))
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
