"""Correct programs give the same with megapatch, to the bit, but for what a patch is meant to change."""

from __future__ import annotations

import pytest
import torch
from rigs.megatron.save import minor
from rigs.where import chosen

from megapatch._engine.settings import SAME_NUMBERS
from megapatch.patches import PATCHES

from . import runs
from .compare import different, same
from .table import PROGRAMS, in_ci, pairs

pytestmark = pytest.mark.skipif(minor() < 16, reason="older Megatrons lack half of what these programs do")

PAIRS = pairs()
IN_CI = in_ci(PAIRS)
MEANT = [pair for pair in PAIRS if PROGRAMS[pair[0]].changed]


@pytest.fixture(scope="module")
def records(request, tmp_path_factory):
    """Return a function: the records of all pairs that are tested, in this mode, with these variables."""
    wanted = chosen(request, "program", "layout")
    asked = {}

    def of_mode(mode, only=PAIRS, **env):
        key = mode, *env.values()
        if key not in asked:
            folder = tmp_path_factory.mktemp("saves")
            asked[key] = runs.run([pair for pair in only if pair in wanted], mode, folder, **env)
        return asked[key]

    return of_mode


@pytest.mark.parametrize(
    ("program", "layout"),
    [pytest.param(*pair, marks=() if pair in IN_CI else pytest.mark.nightly) for pair in PAIRS],
)
def test_a_correct_program_is_the_same_with_megapatch(records, program, layout):
    pair = program, layout
    found = different(records(runs.PLAIN)[pair], records(runs.PATCHED)[pair])
    assert set(found) == PROGRAMS[program].kinds(layout), in_lines(found)


@pytest.mark.nightly
@pytest.mark.parametrize(("program", "layout"), MEANT)
def test_without_its_patch_nothing_differs(records, program, layout):
    pair = program, layout
    patches = PROGRAMS[program].changed
    alike = [each for each in MEANT if PROGRAMS[each[0]].changed.keys() == patches.keys()]
    disabled = records(runs.PATCHED, alike, MEGAPATCH_DISABLE=",".join(patches))
    found = different(records(runs.PLAIN)[pair], disabled[pair])
    assert not found, in_lines(found)


@pytest.mark.nightly
@pytest.mark.parametrize(("program", "layout"), PAIRS)
def test_the_patches_that_keep_numbers_do(records, program, layout):
    """No program here fails. A save agrees by more collectives on whether it has failed anywhere."""
    pair = program, layout
    found = different(records(runs.PLAIN)[pair], records(runs.PATCHED, MEGAPATCH_ONLY=SAME_NUMBERS)[pair])
    changed, kept = PROGRAMS[program].changed, {patch.name for patch in PATCHES if not patch.changes_numbers}
    assert set(found) == {kind for name in changed.keys() & kept for kind in changed[name]}, in_lines(found)


@pytest.mark.nightly
@pytest.mark.parametrize(("program", "layout"), PAIRS)
def test_the_audit_finds_nothing_and_changes_nothing(records, program, layout):
    pair = program, layout
    watched = records(runs.WATCHED)[pair]
    found = different(records(runs.PLAIN)[pair], watched)
    its_own = {"collectives", "findings"}  # it compares ranks
    assert set(found) - its_own == PROGRAMS[program].kinds(layout) - its_own, in_lines(found)
    assert [rank["findings", "all"] for rank in watched] == [[], []]


def test_there_are_enough_programs():
    assert len(PAIRS) >= 150


def test_one_bit_is_seen():
    one = torch.ones(2)
    for other in (one.double(), one.view(1, 2), torch.tensor([1.0, 1.0 + 2**-23]), [1.0, 1.0]):
        assert not same(one, other)
    assert not same(torch.zeros(1), -torch.zeros(1)) and not same(0.0, -0.0) and not same(1, True)
    assert same({"a": [(one, float("nan"))]}, {"a": [(one.clone(), float("nan"))]})
    assert (
        "number 1"
        in different([{("collectives", "all"): [1, 2]}], [{("collectives", "all"): [1, 3]}])["collectives"]
    )


def in_lines(found):
    return "\n".join(f"{kind}: {words}" for kind, words in found.items()) or "nothing differs"
