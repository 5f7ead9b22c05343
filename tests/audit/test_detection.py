"""Mistakes of trainers, on the real Megatron without patches: found where they first act, and nothing else is.

Correct trainers are in test_correct.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from rigs.audit import running_audit
from rigs.cells import AUDITED, run_cells
from rigs.megatron.options import UNPATCHED
from rigs.mistakes.table import LATER, MISTAKES, as_markdown, as_sentence
from rigs.where import chosen, with_nightly

from megapatch import audit
from megapatch.audit import RULES
from megapatch.testing import init_parallel, tiny_gpt

PAGE = (Path(__file__).parents[2] / "docs" / "audit-tests.md").read_text()
STEPS = 3
SAMPLED = ("main-params-agree", "kept-between-steps")  # they know the step, however late they are read
MOST_MISSED = 0.1  # of all mistakes; those that cannot be seen in Megatron's objects are among them


def found(mistake, before=None):
    """Return what is found in some steps, the first of which compares ranks if `before` is None."""
    init_parallel(**mistake.layout)
    audit.clear()
    model = tiny_gpt(layers=4, **mistake.options)
    ledger = running_audit().ledger
    before = ledger.step = ledger.step if before is None else before
    for step in range(STEPS):
        mistake.take_step(model, step)
    results = [*audit.findings(), *audit.notes()]
    return [(one.rule, one.step - before, one.rank, one.is_note, str(one)) for one in results]


def job(rank, world_size, names, before=None):
    for name in MISTAKES:
        if name in names:
            yield name, partial(found, MISTAKES[name], before)


@pytest.fixture(scope="module")
def ranks(request):
    return run_cells(job, 2, chosen(request, "name"), env={**UNPATCHED, **AUDITED})


@pytest.mark.parametrize("name", with_nightly([*MISTAKES]))
def test_it_is_found_where_it_first_acts(ranks, name):
    expected = MISTAKES[name].finds
    by_rank = [{rule: step for rule, step, *_ in cells[name]} for cells in ranks]
    assert {rule: step for results in by_rank for rule, step in results.items()} == expected, by_rank
    for rank, cells in enumerate(ranks):
        assert {where for _, _, where, *_ in cells[name]} <= {rank}
        for rule, _, _, is_note, text in cells[name]:
            assert is_note or not RULES[rule].is_note, text
            assert text.endswith(f" If that is meant: MEGAPATCH_AUDIT_ACCEPT={rule}.") == is_note


@pytest.fixture(scope="module")
def between_comparisons(request):
    return run_cells(job, 2, chosen(request, "mistaken"), 33, env={**UNPATCHED, "MEGAPATCH_AUDIT": "1"})


@pytest.mark.parametrize("mistaken", with_nightly([name for name in MISTAKES if MISTAKES[name].finds]))
def test_it_is_found_between_comparisons_of_ranks(between_comparisons, mistaken):
    expected = MISTAKES[mistaken].finds
    found = {rule: step for cells in between_comparisons for rule, step, *_ in cells[mistaken]}
    assert bool({*found} & {*expected}) == (mistaken not in LATER), found
    assert all(found[rule] == expected[rule] for rule in SAMPLED if rule in found), found


def test_most_are_found():
    missed = [mistake.name for mistake in MISTAKES.values() if not mistake.finds]
    assert len(MISTAKES) >= 76 and len(missed) <= MOST_MISSED * len(MISTAKES)


def test_the_page_has_them():
    """`python -m rigs.mistakes.table` in tests/ prints the table."""
    missing = [row for row in as_markdown().splitlines() if f"\n{row}\n" not in PAGE]
    assert not missing
    assert as_sentence() in " ".join(PAGE.split("\n"))
