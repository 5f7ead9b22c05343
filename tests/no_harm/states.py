"""The job of the ranks: after each of a program's calls, all state that has changed since the last one.

A record is a list of (the call, what has changed, by place), of the patched functions that ran, and of all that
are in place.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import random
import re
import signal
import sys
import types

import torch
from process_state.table import FILE, read
from rigs.walker import changed, copies, of_modules, of_process, walk
from way_back import streams
from way_back.pictures import take_logged

from megapatch._python.layers import MARK, layers_of
from megapatch.testing import init_parallel

from . import runs
from .calls import CALLS
from .layouts import LAYOUTS
from .trainer import Run, parts_of

VOLATILE = (
    *("Timer._elapsed", "Timer._start_time", "Timer._active_time"),
    *("training._TRAIN_START_TIME", "training._LEGACY_TRAIN_START_TIME"),
    *("FileSystemReader.load_id", "StorageMeta.load_id", "StorageMeta.save_id"),
)
"""Times, and identifiers that are random."""
MODULES = {row.module for row in read(FILE.read_text()) if row.project == "megatron-core"} | {
    f"megatron.core.models.common.embeddings.{name}rotary_pos_embedding" for name in ("", "yarn_")
}
"""Those with state that outlives a model."""
LONGEST = 300
"""Seconds that a program may take."""
CACHED = type(functools.lru_cache(len))


def record(pairs, mode, folder, patches, **env):
    """Return each rank's record by pair, or, of a pair that failed, the text of its failure."""
    apart = sorted(attribute for patch in patches for attribute, _ in patch.leaves)
    modules = sorted({site.module for patch in patches for site in patch.sites})
    ours = [name for name in modules if name.startswith(("megatron.core", "megatron.training"))]
    return runs.run(pairs, mode, folder, apart, ours, of=job, **env)


# ------------------------------------------------------------------------------------------ in the ranks
def job(rank, world_size, pairs, folder, apart, modules):
    torch.use_deterministic_algorithms(True, warn_only=True)
    signal.signal(signal.SIGALRM, runs._too_long)
    init_parallel()
    runs.quick_writer()
    for name in modules:
        with contextlib.suppress(ImportError):  # of another release
            importlib.import_module(name)
    targets = patched_functions()
    for layout in dict.fromkeys(layout for _, layout in pairs):
        runs.set_up(LAYOUTS[layout])
        for number, pair in enumerate(pairs):
            if pair[1] == layout:
                place = f"{folder}/{number}"
                yield pair, functools.partial(states, *pair, rank, place, apart, targets)


def states(program, name, rank, folder, apart, targets):
    """Return the changes after each call, and the patched functions that ran, and that are in place."""
    streams.seed()
    random.seed(1)
    take_logged()
    forget_caches()
    if rank == 0:
        os.makedirs(folder)
    torch.distributed.barrier()
    run = Run(LAYOUTS[name], rank, folder)
    run.kept = []  # what a program has made besides its trainers
    looks = rank == 0 or bool(LAYOUTS[name].parallel)  # others have like state on both ranks
    found, ran, before = [], set(), {}
    signal.alarm(LONGEST)
    with stopped_alarm(), LAYOUTS[name].in_use():
        steps, call, result = CALLS[program][0](run), "nothing", None
        while call is not None:
            if looks:
                gc.collect()
                after = walk(roots(run, result), apart, VOLATILE, os.path.dirname(folder))
                found.append((call, {place: text for place, (_, text) in changed(before, after).items()}))
                before = after
            with noted(targets, ran):
                call, result = next(steps, (None, None))
    return [*found, ("all calls", copied(run))] if looks else [], sorted(ran), sorted(targets.values())


def forget_caches():
    """Clear what functions of Megatron's remember, and count, of the programs before."""
    for name in [name for name in sys.modules if name.startswith("megatron.")]:
        for owner in [sys.modules[name], *vars(sys.modules[name]).values()]:
            for each in list(vars(owner).values()) if issubclass(type(owner), (type, types.ModuleType)) else ():
                if type(each) is CACHED:
                    each.cache_clear()


def roots(run, result):
    """Return what is looked at: models, optimizers, schedules, the call's result, modules and the process."""
    found = {}
    for number, trainer in enumerate(run.trainers):
        found[f"model{number}"], found[f"schedule{number}"] = trainer.model, trainer.schedule
    return {**found, "kept": run.kept, "result": result, **of_modules(MODULES), "process": of_process()}


def copied(run):
    """Return whether models, optimizers, schedules and configs pickle and deep-copy, by their places."""
    found = {}
    for number, trainer in enumerate(run.trainers):
        inner = [part.optimizer for part in parts_of(trainer.optimizer)]
        for name, each in {
            "models": trainer.models(),
            "optimizer": trainer.optimizer,
            "inner optimizers": inner,
            "schedule": trainer.schedule,
            "config": trainer.model.config,
        }.items():
            found[f"copies of {name} {number}"] = ", ".join(copies(each))
    return found


@contextlib.contextmanager
def stopped_alarm():
    try:
        yield
    finally:
        signal.alarm(0)


def patched_functions():
    """Return the patched functions that are in place: by code and captured objects, patch and target."""
    found = {}
    for module in [each for name, each in sys.modules.items() if name.startswith("megapatch.patches.megatron.")]:
        for site in module.PATCH.sites if hasattr(module, "PATCH") else ():
            for path in site.replace if site.module in sys.modules else ():
                function = sys.modules[site.module]
                for name in path.split("."):
                    function = getattr(function, name, None)
                for layer in layers_of(function):
                    if vars(layer).get(MARK) == module.PATCH.name:
                        found[_key(layer.__code__, [cell.cell_contents for cell in layer.__closure__ or ()])] = (
                            f"{module.PATCH.name}: {site.module}:{path}"
                        )
    return found


def _key(code, captured):
    return code, tuple(map(id, captured))


@contextlib.contextmanager
def noted(targets, ran):
    """Add the patched functions that are called here."""
    codes = {code for code, _ in targets}

    def profile(frame, event, argument):
        if event == "call" and frame.f_code in codes:
            captured = [frame.f_locals.get(name) for name in frame.f_code.co_freevars]
            ran.add(targets.get(_key(frame.f_code, captured), frame.f_code.co_name))

    sys.setprofile(profile if codes else None)
    try:
        yield
    finally:
        sys.setprofile(None)


# ------------------------------------------------------------------------------------------ in the test
PART = re.compile(r"\{([^{}]*\.[^{}]*)\}")


def differences(plain, patched):
    """Return what differs after each call and did not before it: (rank, call, place, both texts)."""
    found = []
    for rank, ((one, *_), (other, *_)) in enumerate(zip(plain, patched, strict=True)):
        if not one:  # a rank that does not look
            continue
        mine, theirs = dict(one[0][1]), dict(other[0][1])
        # At the beginning that is what earlier programs have left, and have been blamed for.
        known = changed(mine, theirs)
        for (call, changes), (name, others) in zip(one[1:], other[1:], strict=True):
            assert call == name
            mine.update(changes)
            theirs.update(others)
            new = {
                place: (mine.get(place), theirs.get(place))
                for place in dict.fromkeys([*changes, *others])
                if mine.get(place) != theirs.get(place)
            }
            found += [(rank, call, place, texts) for place, texts in new.items() if known.get(place) != texts]
            known = {**known, **new}
    return found


def by_mark(found):
    """Return differences by the attribute apart that they are in; "" for those in none."""
    marked = {}
    for each in found:
        marks = PART.findall(each[2])
        marked.setdefault(marks[-1] if marks else "", []).append(each)
    return marked


def in_words(found, most=20):
    """Return differences in words: the first of each call and kind of place."""
    kinds = {}
    for rank, call, place, texts in found:
        kinds.setdefault((call, re.sub(r"\d+", "N", place)), []).append((rank, place, texts))
    lines = []
    for (call, _), places in list(kinds.items())[:most]:
        rank, place, (plain, patched) = places[0]
        lines += [f"after {call}, rank {rank}, {len(places)} of this kind: {place}", f"    plain   {plain}"]
        lines += [f"    patched {patched}"]
    return "\n".join([*lines, f"... {len(kinds)} kinds"])
