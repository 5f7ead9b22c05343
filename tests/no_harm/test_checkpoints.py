"""A checkpoint is read the same whether megapatch was there when it was written, also by another release.

NO_HARM_CHECKPOINTS names a folder where what a release has written stays, for the run with a later one.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from rigs.megatron.options import quick_writer
from rigs.megatron.save import minor
from rigs.where import chosen
from way_back import streams
from way_back.pictures import take_logged

from megapatch.testing import init_parallel

from . import runs
from .compare import different
from .layouts import DENSE, LAYOUTS, here
from .trainer import Run

pytestmark = [
    pytest.mark.skipif(minor() < 16, reason="what older Megatrons write torch does not read"),
    pytest.mark.nightly,
]
NAMES = here((*DENSE, "tp", "pp", "moe", "bf16, sharded", "bf16, sharded, overlaps", "pp, vpp", "ep"))
BY = (runs.PLAIN, runs.PATCHED)


# ------------------------------------------------------------------------------------------ in the ranks
def job(rank, world_size, cells, folder, place, reads):
    """Write, or read, a checkpoint of each (release and writer, layout)."""
    signal.signal(signal.SIGALRM, runs._too_long)
    torch.use_deterministic_algorithms(True, warn_only=True)
    init_parallel()
    quick_writer()
    for name in dict.fromkeys(name for _, name in cells):
        runs.set_up(LAYOUTS[name])
        for writer, layout in cells:
            if layout == name:
                call = functools.partial(read if reads else write, name, rank, f"{place}/{writer}", folder)
                yield (writer, name), call


def begun(name, rank, folder):
    streams.seed()
    take_logged()
    signal.alarm(runs.LONGEST)
    return Run(LAYOUTS[name], rank, folder)


def write(name, rank, place, folder):
    with LAYOUTS[name].in_use():
        trainer = begun(name, rank, folder).trainer()
        trainer.train(0, 1)
        trainer.model.gather_parameters()
        trainer.disk.save(f"{place}/{name}")
        if rank == 0:
            torch.save((trainer.optimizer.state_dict(), trainer.schedule.state_dict()), f"{place}/{name}.pt")
        torch.distributed.barrier()
    signal.alarm(0)


def read(name, rank, place, folder):
    with LAYOUTS[name].in_use():
        run = begun(name, rank, folder)
        trainer = run.trainer()
        trainer.train(999)  # gives a fresh optimizer state, as Transformer Engine's would have
        trainer.model.gather_parameters()
        found = trainer.disk.read(f"{place}/{name}")
        trainer.disk.load_weights(found)
        trainer.disk.load_optimizer(found)
        trainer.schedule = trainer.layout.schedule_of(trainer.optimizer)
        trainer.disk.load_schedule(found)
        run.note("states", str(torch.load(f"{place}/{name}.pt", weights_only=False)))
        trainer.train(2)
        signal.alarm(0)
        return run.outcome()


# ------------------------------------------------------------------------------------------ in the test
@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """Return what readers of each mode have found, by (release and writer, layout)."""
    wanted = sorted(chosen(request, "layout"))
    place = Path(os.environ.get("NO_HARM_CHECKPOINTS") or tmp_path_factory.mktemp("checkpoints"))
    release, new = f"0.{minor()}", tmp_path_factory.mktemp("scratch")
    shutil.rmtree(place / release, ignore_errors=True)
    for mode in BY:
        (place / release / mode).mkdir(parents=True)
        runs.run([(f"{release}/{mode}", name) for name in wanted], mode, new / "w", place, False, of=job)
    written = [path.name for path in place.iterdir() if path.name <= release]
    cells = [(f"{each}/{mode}", name) for each in written for mode in BY for name in wanted]
    there = [(writer, name) for writer, name in cells if (place / writer / f"{name}.pt").exists()]
    return {mode: runs.run(there, mode, new / "r", place, True, of=job) for mode in BY}


@pytest.mark.parametrize("layout", NAMES)
def test_whoever_wrote_a_checkpoint_it_is_read_the_same(found, layout):
    for mode, records in found.items():
        releases = {writer.partition("/")[0] for writer, name in records if name == layout}
        assert f"0.{minor()}" in releases
        for release in releases:
            one, other = (records[f"{release}/{writer}", layout] for writer in BY)
            assert not different(one, other), f"of {release}, read {mode}: {different(one, other)}"
