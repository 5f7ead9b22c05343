"""The quick environment tests each of Megatron's patches; in CI each module has a turn with one Megatron."""

from pathlib import Path

from rigs.quick import OF_PATCHES, OF_TRAIN_STEP, QUICK
from rigs.turns import MEGATRONS, PYTHONS, has_its_turn

from megapatch.patches import PATCHES

TESTS = Path(__file__).parent


def test_each_of_megatrons_patches_has_its_tests():
    named = {patch.name.partition(".")[2].replace("-", "_") for patch in PATCHES if patch.family == "megatron"}
    assert {f"patches/megatron/test_{name}.py" for name in named} <= {
        node.partition("::")[0] for node in OF_PATCHES
    }


def test_the_cases_of_train_step_are_there():
    for node in OF_TRAIN_STEP:
        file, _, test = node.partition("[")[0].partition("::")
        assert f"\ndef {test}(" in (TESTS / file).read_text(), f"{node}: expected such a test; found none"


def test_each_module_has_one_turn_and_the_quick_tests_have_every_third():
    files = [*TESTS.glob("patches/**/test_*.py"), *TESTS.glob("verify/test_*.py")]
    for file in files:
        module = file.relative_to(TESTS).as_posix()
        turns = [one for one in MEGATRONS if has_its_turn(f"{module}::test_that_is_not_quick", f"{one}.2")]
        assert len(turns) in (1, len(MEGATRONS))
        assert has_its_turn(module, "0.19.2")
    for node in QUICK:
        turns = [number for number, one in enumerate(MEGATRONS) if has_its_turn(node, f"{one}.2")]
        assert any(set(range(first, len(MEGATRONS), 3)) <= set(turns) for first in range(3))
        assert has_its_turn(node, "0.19.2")


def test_without_megatron_each_module_has_one_of_the_other_pythons():
    modules = [file.name for file in TESTS.glob("test_*.py")]
    for module in modules:
        assert sum(has_its_turn(module, "", python) for python in PYTHONS) == 1
        assert has_its_turn(module, "", (3, 11)) and has_its_turn(module, "0.19.2", (3, 12))
    assert all(any(has_its_turn(module, "", python) for module in modules) for python in PYTHONS)
