"""After loads, aborts, saves and what else a trainer does, the next two steps are those of a process that has done
only what counts, bit for bit."""

from __future__ import annotations

import pytest
from rigs.megatron.save import minor

from way_back.chosen import CHOSEN, chosen_here
from way_back.layouts import LAYOUTS, layouts_here
from way_back.plan import (
    ASYNCHRONOUS,
    OPERATIONS,
    PLAIN,
    REPLAYED,
    TRAIN,
    WAYS,
    Sequence,
    WeightsOf,
    is_free,
    plan,
)
from way_back.search import drawn, run

DRAWN = 60


def differing(sequences):
    return {sequence: differences for sequence, differences in run(sequences).items() if differences}


def test_sequences_leave_what_only_their_steps_and_loads_leave():
    assert not (found := differing(chosen_here())), found


@pytest.mark.nightly
def test_so_do_drawn_ones():
    assert not (found := differing(drawn(1, DRAWN, layouts_here(), is_free))), found


KNOWN = {  # of each layout the kinds of values that differ, at least
    Sequence("fp16", ("step", f"{PLAIN} in the optimizer")): {"loss scale"},
    Sequence("moe", (f"{PLAIN} in the optimizer",)): {"logged", "expert bias"},
}


def test_what_is_known_is_seen():
    here = [sequence for sequence in KNOWN if sequence.layout in layouts_here()]
    found = run(here)
    assert all(KNOWN[sequence] <= found[sequence].keys() for sequence in here), found


def test_chosen_ones_do_every_operation():
    possible = set(OPERATIONS) - {f"{PLAIN} {REPLAYED}"}  # which is known wherever there are routes
    assert {operation for sequence in CHOSEN for operation in sequence.operations} == possible
    assert minor() < 17 or chosen_here() == list(CHOSEN)


def test_what_counts():
    then = plan(Sequence("fp32", ("step", "save", "step", "abort before the reduce", "load"))).then
    assert [step.data for step in then.program] == [0] and then.steps == 1
    then = plan(Sequence("fp32", ("step", "save", "step", "load of the weights"))).then
    assert [type(item) is WeightsOf for item in then.program] == [False, False, True] and then.steps == 2
    kept = plan(Sequence("fp32", ("load", "finish the async save", "step that overflows", "step"))).sequence
    assert kept.operations == ("step",)


def test_every_operation_can_be_drawn():
    sequences = drawn(0, 1500, layouts_here())
    missing = set(OPERATIONS) - {operation for one in sequences for operation in one.operations}
    on_disk = any(LAYOUTS[name].is_on_disk and LAYOUTS[name].can_save for name in layouts_here())
    expected = set() if on_disk else set(ASYNCHRONOUS)
    if not any(LAYOUTS[name].has_train for name in layouts_here()):
        expected |= {TRAIN, f"{TRAIN} that raises"}
    if not any(LAYOUTS[name].has_replay for name in layouts_here()):
        expected |= {f"{way} {REPLAYED}" for way in WAYS}
    assert missing == expected
