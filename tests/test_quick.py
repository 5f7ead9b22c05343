"""The quick environment has tests of each of Megatron's patches."""

from pathlib import Path

from rigs.quick import OF_PATCHES, QUICK

from megapatch.patches import PATCHES

TESTS = Path(__file__).parent


def test_each_of_megatrons_patches_has_its_tests():
    assert set(OF_PATCHES) == {patch.name for patch in PATCHES if patch.name.startswith("megatron.")}


def test_the_tests_are_there():
    for node in QUICK:
        file, _, test = node.partition("[")[0].partition("::")
        assert f"\ndef {test}(" in (TESTS / file).read_text(), f"{node}: expected such a test; found none"
