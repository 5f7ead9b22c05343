"""Mistakes of trainers, on the real Megatron without patches: found where they first act, and nothing else is.

Correct trainers are in test_correct.py.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from rigs.audit import running_audit
from rigs.cells import AUDITED, run_cells
from rigs.log import Log
from rigs.megatron.options import UNPATCHED
from rigs.mistakes.gradients import LEARNS
from rigs.mistakes.table import ACCUSED, IN_CI, LATER, MISTAKES, QUIET, SEEN, as_markdown, as_sentences
from rigs.where import chosen, with_nightly

from megapatch import audit
from megapatch.audit import RULES
from megapatch.testing import init_parallel, tiny_gpt

PAGE = (Path(__file__).parents[2] / "docs" / "audit-tests.md").read_text()
STEPS = 3
SAMPLED = ("main-params-agree", "kept-between-steps")  # they know the step, however late they are read
MOST_MISSED = 0.1  # of all mistakes; those that cannot be seen in Megatron's objects are among them
STEPS_BY_DEFAULT = 9  # ranks are compared, and samples read, after 1, 2, 4 and 8 of them
MOST_QUIET = 0.1  # of those that are found


def found(mistake, before=None):
    """Return what is found in some steps, the first of which compares ranks if `before` is None; all is judged."""
    init_parallel(**mistake.layout)
    audit.clear()
    model = tiny_gpt(layers=4, **mistake.options)
    ledger = running_audit().ledger
    before = ledger.step = ledger.step if before is None else before
    ledger.judged.clear()
    for step in range(STEPS):
        mistake.take_step(model, step)
    results = [*audit.findings(), *audit.notes()]
    judged = [name for name, rule in RULES.items() if any(rule.counts(name, ledger.judged).values())]
    no_steps = ledger.step == before  # of Megatron's optimizer; and a step on zeros is not one with gradients
    assert no_steps or {one.rule for one in results} <= {*judged, "gradients-used"}
    return [(one.rule, one.step - before, one.rank, one.is_note, str(one)) for one in results]


def said(mistake):
    """Return the rules that a log at WARNING names in the first steps of a run, and whether as notes."""
    init_parallel(**mistake.layout)
    audit.clear()
    model, log = tiny_gpt(layers=4, **mistake.options), Log()
    log.setLevel(logging.WARNING)
    running_audit().ledger.step = 0
    for step in range(STEPS_BY_DEFAULT):
        mistake.take_step(model, step)
    lines = [re.match(r"audit: (note: )?([\w-]+) \(after", text) for text in log.texts]
    return [(line[2], bool(line[1])) for line in lines if line]


def job(rank, world_size, names, look, *args):
    for name in MISTAKES:
        if name in names:
            yield name, partial(look, MISTAKES[name], *args)


@pytest.fixture(scope="module")
def ranks(request):
    return run_cells(job, 2, chosen(request, "name"), found, env={**UNPATCHED, **AUDITED})


@pytest.mark.parametrize("name", with_nightly([*MISTAKES], IN_CI))
def test_it_is_found_where_it_first_acts(ranks, name):
    expected = MISTAKES[name].finds
    by_rank = [{rule: step for rule, step, *_ in cells[name]} for cells in ranks]
    assert {rule: step for results in by_rank for rule, step in results.items()} == expected, by_rank
    assert name not in ACCUSED or not all(is_note for *_, is_note, _ in ranks[0][name])
    for rank, cells in enumerate(ranks):
        assert {where for _, _, where, *_ in cells[name]} <= {rank}
        for rule, _, _, is_note, text in cells[name]:
            assert is_note or not RULES[rule].is_note, text
            assert text.endswith(f" If that is meant: MEGAPATCH_AUDIT_ACCEPT={rule}.") == is_note


@pytest.fixture(scope="module")
def between_comparisons(request):
    return run_cells(job, 2, chosen(request, "mistaken"), found, 33, env={**UNPATCHED, "MEGAPATCH_AUDIT": "1"})


@pytest.mark.parametrize("mistaken", with_nightly(SEEN))
def test_it_is_found_between_comparisons_of_ranks(between_comparisons, mistaken):
    expected = MISTAKES[mistaken].finds
    found = {rule: step for cells in between_comparisons for rule, step, *_ in cells[mistaken]}
    assert bool({*found} & {*expected}) == (mistaken not in LATER), found
    assert all(found[rule] == expected[rule] for rule in SAMPLED if rule in found), found


@pytest.fixture(scope="module")
def said_by_default(request):
    return run_cells(job, 2, chosen(request, "by_default"), said, env={**UNPATCHED, "MEGAPATCH_AUDIT": "1"})


@pytest.mark.nightly
@pytest.mark.parametrize("by_default", SEEN)
def test_a_default_log_says_it_while_it_runs_and_a_note_once(said_by_default, by_default):
    lines = [cells[by_default] for cells in said_by_default]
    named = {rule for each in lines for rule, _ in each}
    assert bool(named & {*MISTAKES[by_default].finds}) == (by_default not in QUIET), lines
    assert all(count == 1 for each in lines for (_, is_note), count in Counter(each).items() if is_note), lines


def test_most_are_found():
    missed = [mistake.name for mistake in MISTAKES.values() if not mistake.finds]
    assert len(MISTAKES) >= 76 and len(missed) <= MOST_MISSED * len(MISTAKES)
    assert len(QUIET) <= MOST_QUIET * len(SEEN)


def test_the_page_has_them():
    """`python -m rigs.mistakes.table` in tests/ prints the table."""
    missing = [row for row in as_markdown().splitlines() if f"\n{row}\n" not in PAGE]
    assert not missing
    page = " ".join(PAGE.split("\n"))
    assert as_sentences() in page
    assert f"Of the mistakes above {len(SEEN)} are found" in page or not LEARNS
