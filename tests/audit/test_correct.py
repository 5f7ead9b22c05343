"""Correct trainers, with the audit and without megapatch: nothing is found, and no number is another."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from audit.correct import CORRECT
from audit.correct.bending import REDUCES_AGAIN
from no_harm.compare import different
from rigs.cells import AUDITED, run_cells
from rigs.imported import WITHOUT_MEGAPATCH
from rigs.megatron.options import ADAM, UNPATCHED, assert_same_parameters
from rigs.where import chosen, with_nightly

from megapatch.testing import TinyGPT, init_parallel, tiny_gpt

STEPS = 3
PLAIN = {"sgd": {}, "adam": ADAM}
PAGE = (Path(__file__).parents[2] / "docs" / "audit-tests.md").read_text()


def trained(program):
    """Return the numbers that a program leaves on this rank."""
    init_parallel(**program.layout)
    model = tiny_gpt(layers=4, **program.options)
    for step in range(STEPS):
        program.take_step(model, step)
    models = [model, *(value for value in vars(model).values() if isinstance(value, TinyGPT))]
    for each in models:
        each.gather_parameters()
    numbers = {("weights", str(number)): each.parameters() for number, each in enumerate(models)}
    return {**numbers, ("numbers", "logged"): getattr(model, "numbers", [])}


def noted(program):
    """Return the rules that the audit has notes of, with the steps before; a finding fails the cell."""
    from rigs.audit import running_audit

    from megapatch import audit

    audit.clear()
    before = running_audit().ledger.step
    left = trained(program)
    return left, {each.rule: each.step - before for each in audit.notes()}, list(map(str, audit.findings()))


def job(rank, world_size, names, look):
    for name in names:
        yield name, partial(look, CORRECT[name])


def three_steps(rank, world_size):
    init_parallel()
    for name, options in PLAIN.items():
        model = tiny_gpt(layers=4, **options)
        yield name, lambda model=model: [model.train_step(step) for step in range(STEPS)] and model.parameters()


def ran(look, *names, **options):
    @pytest.fixture(scope="module")
    def ranks(request):
        chosen_ones = set().union(*(chosen(request, each) for each in names))
        return run_cells(job, 2, [name for name in CORRECT if name in chosen_ones], look, timeout=1800, **options)

    return ranks


audited = ran(noted, "name", "compared", env={**UNPATCHED, **AUDITED})
alone = ran(trained, "compared", "by_default", "plain", env=WITHOUT_MEGAPATCH)
patched = ran(noted, "by_default", env={"MEGAPATCH_AUDIT": "1"})


@pytest.fixture(scope="module")
def expected():
    return run_cells(three_steps, 2, env=WITHOUT_MEGAPATCH)[0]


def of(ranks, name):
    """Return the numbers of each rank, the notes of all, and the findings."""
    left, notes, findings = zip(*(cells[name] for cells in ranks), strict=True)
    return left, notes[0] | notes[1], [*findings[0], *findings[1]]


@pytest.mark.parametrize("name", with_nightly([*CORRECT]))
def test_nothing_is_found(audited, name):
    _, notes, findings = of(audited, name)
    assert findings == [] and notes == CORRECT[name].finds


@pytest.mark.parametrize("compared", with_nightly([*CORRECT]))
def test_no_number_is_another(audited, alone, compared):
    assert different([cells[compared] for cells in alone], of(audited, compared)[0]) == {}


@pytest.mark.parametrize("plain", with_nightly([name for name, each in CORRECT.items() if each.is_plain]))
def test_another_way_to_the_same_step_gives_the_same_weights(alone, expected, plain):
    weights = expected[CORRECT[plain].options.get("optimizer", "sgd")]
    for cells in alone:
        found = cells[plain]["weights", "0"]
        whole = {name: value for name, value in found.items() if value.shape == weights[name].shape}
        assert len(whole) > 5  # tensor-parallel ranks have parts of the others
        assert_same_parameters(whole, {name: weights[name] for name in whole})


MINDED = (
    # megatron.gathered-when-read refuses both: it cannot know that only names are read, or what torch has gathered
    "names are read after a step",
    "gathered by hand, in place, and copied",
    # megatron.prepare-grads-once does not divide gradients again that were multiplied back
    "gradients are divided, read and multiplied",
)
"""Correct trainers that a patch does not leave as they are, as its Limits say."""


@pytest.mark.nightly
@pytest.mark.parametrize("by_default", [name for name in CORRECT if name not in MINDED])
def test_nothing_is_found_by_default_with_all_patches(patched, alone, by_default):
    left, notes, findings = of(patched, by_default)
    assert findings == [] and {*notes} <= {*CORRECT[by_default].finds}
    assert different([cells[by_default] for cells in alone], left) == {}


def test_the_page_counts_them():
    noted = sum(bool(each.finds) for each in CORRECT.values())
    plain = sum(each.is_plain for each in CORRECT.values())
    assert len({each.take_step for each in CORRECT.values()}) >= 100
    said = f"it watches {len(CORRECT)} correct trainers", f"names them. {noted} of them", f"those of {plain} that"
    assert all(each in " ".join(PAGE.split()) for each in said) or not REDUCES_AGAIN
