"""The quick environment tests each of Megatron's patches; in CI each module has a turn with one Megatron."""

from pathlib import Path

from rigs.needs import runs_without_megatron
from rigs.quick import OF_PATCHES, OF_TRAIN_STEP, QUICK
from rigs.turns import ALWAYS, MEGATRONS, ONCE, OTHERS, README, WITH_THE_READMES, has_its_turn

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


def test_each_module_has_one_turn():
    files = [*TESTS.glob("patches/**/test_*.py"), *TESTS.glob("verify/test_*.py")]
    for file in files:
        module = file.relative_to(TESTS).as_posix()
        turns = [one for one in MEGATRONS if has_its_turn(f"{module}::test_that_is_not_quick", f"{one}.2")]
        assert len(turns) in ([0] if module.startswith(ONCE) else [1, len(MEGATRONS)])
        assert has_its_turn(module, "0.19.2", (3, 11))
    for node in QUICK:
        assert has_its_turn(node, "0.19.2", (3, 11))
        assert any(has_its_turn(node, f"{one}.2") for one in MEGATRONS)
    assert all(has_its_turn(node, f"{one}.2") for node in OF_TRAIN_STEP for one in MEGATRONS)


def test_a_module_of_the_engine_runs_with_the_readmes_python_and_with_one_other():
    modules = [file.name for file in TESTS.glob("test_*.py") if not file.name.startswith(ALWAYS)]
    megatrons = {**dict.fromkeys(OTHERS, ""), (3, 12): "0.19.2"}
    turns = {
        module: [python for python, megatron in megatrons.items() if has_its_turn(module, megatron, python)]
        for module in modules
    }
    for module, pythons in turns.items():
        assert has_its_turn(module, "", README)
        is_of_311 = runs_without_megatron(TESTS / module) or module.startswith(WITH_THE_READMES)
        assert pythons[1:] == ([] if is_of_311 else [(3, 12)])
    assert {python for pythons in turns.values() for python in pythons} == {*megatrons}
    tox = (TESTS.parent / "tox.ini").read_text()
    assert all(f" {module.removesuffix('/')}" in tox for module in WITH_THE_READMES)
