"""The quick environment tests each of Megatron's patches; in CI each module has a turn with one Megatron."""

from pathlib import Path

from rigs.quick import OF_PATCHES, QUICK
from rigs.turns import MEGATRONS, has_its_turn

from megapatch.patches import PATCHES

TESTS = Path(__file__).parent


def test_each_of_megatrons_patches_has_its_tests():
    assert set(OF_PATCHES) == {patch.name for patch in PATCHES if patch.name.startswith("megatron.")}


def test_the_tests_are_there():
    for node in QUICK:
        file, _, test = node.partition("[")[0].partition("::")
        assert f"\ndef {test}(" in (TESTS / file).read_text(), f"{node}: expected such a test; found none"


def test_each_module_has_one_turn_and_the_quick_tests_have_every_second():
    files = [*TESTS.glob("patches/**/test_*.py"), *TESTS.glob("verify/test_*.py")]
    for file in files:
        module = file.relative_to(TESTS).as_posix()
        turns = [one for one in MEGATRONS if has_its_turn(f"{module}::test_that_is_not_quick", f"{one}.2")]
        assert len(turns) in (1, len(MEGATRONS))
        assert has_its_turn(module, "0.19.2")
    for node in QUICK:
        turns = [number for number, one in enumerate(MEGATRONS) if has_its_turn(node, f"{one}.2")]
        assert {0, 2, 4, 6} <= set(turns) or {1, 3, 5} <= set(turns)
        assert has_its_turn(node, "0.19.2")
