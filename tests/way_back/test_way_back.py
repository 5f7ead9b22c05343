"""After loads, aborts, saves and what else a trainer does, the next two steps are those of a process that has done
only what counts, bit for bit."""

from __future__ import annotations

import pytest
from rigs.megatron.options import UNPATCHED, needs_training
from rigs.megatron.save import minor

from way_back.chosen import CHOSEN, chosen_here
from way_back.known import KNOWN, PLAIN, is_free, report_of
from way_back.layouts import LAYOUTS, layouts_here
from way_back.plain import is_right, run_twins
from way_back.plan import ASYNCHRONOUS, OPERATIONS, REPLAYED, TRAIN, WAYS, Sequence, WeightsOf, plan
from way_back.ranks import RAISES
from way_back.reported import REPORTED, REPORTED_HERE
from way_back.search import drawn, run, shrunk

DRAWN, TWINS = 12, 6  # of a thorough run: half a minute on two idle cores
MORE = 48  # each night
BY_ITSELF = {row.report for row in REPORTED_HERE}
TRIES = 16  # batches of drawn sequences, of this many each
BATCH = 25
HERE = [
    row
    for row in KNOWN
    if row.shows.layout in layouts_here()
    and plan(row.shows).sequence == row.shows
    and row.layouts(LAYOUTS[row.shows.layout])
]


def differing(sequences):
    return {sequence: differences for sequence, differences in run(sequences).items() if differences}


def test_sequences_leave_what_only_their_steps_and_loads_leave():
    assert not (found := differing(chosen_here())), found


@pytest.mark.thorough
@pytest.mark.parametrize(("seed", "count"), [(1, DRAWN), pytest.param(2, MORE, marks=pytest.mark.nightly)])
def test_so_do_drawn_ones(seed, count):
    assert not (found := differing(drawn(seed, count, layouts_here(), is_free))), found


@pytest.mark.thorough
@pytest.mark.parametrize(("seed", "count"), [(1, TWINS), pytest.param(2, MORE, marks=pytest.mark.nightly)])
def test_what_plain_megatron_does_right_is_the_same_with_megapatch(seed, count):
    found = run_twins(drawn(seed, count, layouts_here(), is_right))
    assert not any(found.values()), found


def test_chosen_ones_do_every_operation():
    possible = set(OPERATIONS) - {f"{PLAIN} {REPLAYED}"}  # which is known wherever there are routes
    assert {operation for sequence in CHOSEN for operation in sequence.operations} == possible
    assert minor() < 17 or chosen_here() == list(CHOSEN)


@pytest.fixture(scope="module")
def known():
    return run([row.shows for row in HERE])


@pytest.mark.parametrize("row", HERE, ids=lambda row: row.report.partition(":")[0])
def test_what_is_known_still_differs(known, row):
    """If it no longer does, remove its row."""
    assert row.kinds <= set(known[row.shows]), known[row.shows]


AGAIN = [Sequence(layout, (f"{TRAIN} that raises", TRAIN)) for layout in ("fp32", "bf16, sharded, overlaps")]
WITHOUT_REENTRY = {"MEGAPATCH_DISABLE": "megatron.train-reentry"}


@needs_training
def test_train_goes_well_after_it_has_raised():
    assert not (found := differing(AGAIN)), found


@needs_training
def test_it_does_not_without_its_patch():
    for differences in run(AGAIN, WITHOUT_REENTRY).values():
        assert differences[RAISES] == f"in {TRAIN}: AssertionError: timer has already been started"


@pytest.fixture(scope="module")
def unpatched():
    """Return what differs, by the patches that are left out and the sequence."""
    return {
        disabled: run(
            [row.shows for row in REPORTED_HERE if row.disabled == disabled], {"MEGAPATCH_DISABLE": disabled}
        )
        for disabled in {row.disabled for row in REPORTED_HERE}
    }


# With each Megatron; half a minute on two idle cores, as a sequence of report 11 ends its ranks.
@pytest.mark.nightly
@pytest.mark.parametrize("row", REPORTED_HERE, ids=lambda row: row.report)
def test_without_patches_each_reported_defect_shows(unpatched, row):
    found = unpatched[row.disabled][row.shows]
    assert row.kind in found, found


def test_every_report_is_shown_by_some_megatron():
    assert {row.report for row in REPORTED} == {"1", "2", "5", "9", "10a", "10b", "11"}
    assert minor() < 16 or tuple(REPORTED_HERE) == REPORTED


@pytest.mark.nightly
@pytest.mark.thorough
def test_without_patches_the_reported_defects_are_found():
    named = {}
    for number in range(TRIES):
        for sequence, differences in run(drawn(number, BATCH, layouts_here()), UNPATCHED).items():
            for kind in differences:
                if report_of(sequence, kind) in {*named, None} or set(named) >= BY_ITSELF:
                    continue
                shorter, words = shrunk(sequence, kind, UNPATCHED)
                if (report := report_of(shorter, kind)) is not None:
                    named.setdefault(report, (shorter, kind, words))
        if set(named) >= BY_ITSELF:
            break
    for report, found in sorted(named.items()):
        print(report, *found)
    assert set(named) >= BY_ITSELF, named


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
