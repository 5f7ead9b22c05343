"""megatron.tracked-checkpoint-stays in Megatron itself; for Bridge see test_fresh_train_state_of_bridge.py.

jobs/test_killed.py has it with Megatron's own saves, all asynchronous.
"""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
from rigs.diagnosed_sources import NOTHING, each_source
from rigs.imported import run_with_megatron
from rigs.megatron.options import needs_training

from megapatch.patch import unpatched
from megapatch.patches.megatron import tracked_checkpoint_stays
from megapatch.patches.megatron._tracked_checkpoint_of_bridge import (
    OWN,
    diagnose_tracker,
    save_a_copy_of_the_counters,
)
from megapatch.patches.megatron.tracked_checkpoint_stays import PATCH, REMOVE, TRACKER, diagnose, keep_the_tracked

REMOVES = f"""
def get_checkpoint_tracker_filename(checkpoints_path): ...
def {REMOVE}(save_dir, leave_ckpt_num=1, do_async=False):
    return save_dir.rglob("iter_*"), "iter_"
"""
SAVES = """
def save_checkpoint(state, tracker_filename):
    train_state = state.train_state
    def train_state_finalize_fn():
        return tracker_filename, train_state
"""
SOURCES = {
    diagnose: {
        "it removes": (REMOVES, "needed", "complete or not"),
        "it is told": (REMOVES.replace("do_async=False", "*, max_iteration=None"), "fixed", "complete"),
        "it keeps another number": (REMOVES.replace("leave_ckpt_num", "keep"), "unknown", "leave_ckpt_num"),
        "it finds them otherwise": (REMOVES.replace("rglob", "glob"), "unknown", "rglob"),
        "there is nothing": (NOTHING, "unknown", REMOVE),
    },
    diagnose_tracker: {
        "of the training": (SAVES, "needed", "step at which a save is finalized"),
        "of the save": (
            SAVES.replace("return tracker_filename, train_state", "return tracker_filename"),
            "fixed",
            "saved",
        ),
        "another function writes": (
            SAVES.replace("_finalize_fn", "_written"),
            "unknown",
            "train_state_finalize_fn",
        ),
        "it is in another file": (
            SAVES.replace("tracker_filename", OWN),
            "unsupported",
            "Bridge's own",
        ),
        "the counters are elsewhere": (
            SAVES.replace("state.train_state", "state.counters"),
            "unknown",
            "train_state",
        ),
        "it is in both files": (
            SAVES.replace("tracker_filename", OWN).replace(
                "    train_state =", f"    {TRACKER}()\n    train_state =", 1
            ),
            "unknown",
            "to write the tracker",
        ),
        "it takes other counters": (SAVES.replace("(state", "(states"), "unknown", "parameter state"),
        "there is no save": (NOTHING, "unknown", "save_checkpoint"),
    },
}
test_verdicts = each_source(SOURCES)


def left(rank, world_size, folder, cases):
    """Return which of the checkpoints 1 to 3 are left, without the patch and with it, of each case.

    Saves that are asynchronous remove in a thread.
    """
    remove = getattr(importlib.import_module(PATCH.sites[0].module), REMOVE)

    def after(function, tracker, keep, do_async):
        for step in (1, 2, 3):
            (folder / f"iter_{step:07}").mkdir(exist_ok=True)
        file = folder / "latest_checkpointed_iteration.txt"
        if file.is_dir():
            file.rmdir()
        file.unlink(missing_ok=True)
        if tracker == "a folder":  # root may read everything else
            file.mkdir()
        elif tracker is not None:
            step, _, gone = tracker.partition(" ")
            file.write_text(step)
            if gone:
                (folder / f"iter_{int(step):07}").rmdir()
        before = threading.enumerate()
        function(folder if do_async else str(folder), leave_ckpt_num=keep, do_async=do_async)
        for thread in {*threading.enumerate()}.difference(before):
            thread.join()
        return sorted(int(found.name[5:]) for found in folder.glob("iter_*"))

    return {
        (*case, do_async): (after(unpatched(remove), *case, do_async), after(remove, *case, do_async))
        for case in cases
        for do_async in (False, True)
    }


@needs_training
@pytest.mark.quick
def test_the_tracked_checkpoint_and_newer_ones_stay(tmp_path):
    expected = {
        ("2", 1): ([3], [2, 3]),  # 3 is being written
        ("1", 2): ([2, 3], [1, 2, 3]),
        ("3", 1): ([3], [3]),
        ("2", 0): ([1, 2, 3], [1, 2, 3]),  # upstream's: removes nothing
        ("release", 1): ([3], [3]),
        ("4", 1): ([3], [3]),  # of a later step, which has no folder
        ("0", 1): ([3], [1, 2, 3]),  # of an earlier one, which is gone
        ("2 gone", 1): ([3], [1, 3]),  # of one between
        (None, 1): ([3], [3]),  # nothing was saved yet
        ("", 1): ([3], [1, 2, 3]),  # as after a full disk: nobody knows which is complete
        ("a folder", 1): ([3], [1, 2, 3]),  # cannot be read
    }
    both = {(*case, do_async): result for case, result in expected.items() for do_async in (False, True)}
    assert run_with_megatron(left, 1, tmp_path, list(expected)) == [both]


def test_only_the_rank_that_removes_looks_for_the_tracked_checkpoint(monkeypatch):
    monkeypatch.setattr(tracked_checkpoint_stays, "place", lambda: (1, 2))
    remove = keep_the_tracked(lambda save_dir, leave_ckpt_num: leave_ckpt_num)  # this module names no tracker
    assert remove("folder", 1) == 1


SYNCHRONOUS = SimpleNamespace(checkpoint=SimpleNamespace(async_save=False))
ASYNCHRONOUS = SimpleNamespace(checkpoint=SimpleNamespace(async_save=True))
REPAIRED = SAVES.replace("return tracker_filename, train_state", "return tracker_filename")


@pytest.mark.parametrize(
    ("source", "cfg", "is_copied"),
    [(SAVES, ASYNCHRONOUS, True), (SAVES, SYNCHRONOUS, False), (REPAIRED, ASYNCHRONOUS, False)],
    ids=["asynchronous", "synchronous", "repaired"],
)
def test_an_asynchronous_save_gets_a_copy_of_the_counters(source, cfg, is_copied, monkeypatch):
    """The state has its own afterwards, or those that somebody has given it meanwhile."""
    monkeypatch.setitem(sys.modules, "saving", module := ModuleType("saving"))
    exec(source.replace("    def ", "    state.saves(train_state)\n    def ", 1), vars(module))
    seen, counters, others = [], SimpleNamespace(step=1), SimpleNamespace(step=2)
    state = SimpleNamespace(train_state=counters, cfg=cfg, saves=seen.append)
    save = save_a_copy_of_the_counters(module.save_checkpoint)
    save(state, "tracker")
    assert (seen[0] is not counters) is is_copied and seen == [counters]
    assert state.train_state is counters
    state.saves = lambda train_state: setattr(state, "train_state", others)
    save(state, "tracker")
    assert state.train_state is others
