"""`-k` with a patch's name runs all that tests this patch, and nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from rigs import chosen

from megapatch.patches import PATCHES

TESTS = Path(__file__).parent
NAME = "megatron.train-reentry"


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("", None),
        ("train_reentry or contract", None),  # of functions and files
        (NAME, {NAME}),
        (f"{NAME} or slime.train-reentry", {NAME, "slime.train-reentry"}),
        (f"not {NAME}", None),
    ],
)
def test_the_patches_that_an_expression_names(monkeypatch, expression, names):
    monkeypatch.setattr(chosen, "_chosen", set())
    chosen.choose(expression)
    assert chosen.chosen(chosen.NAMES, name=str) == [
        name for name in chosen.NAMES if names is None or name in names
    ]
    assert chosen.all_are_chosen() == (names is None)


class Item:
    def __init__(self, place, families=None, **params):
        self.path, self.callspec = TESTS / place, SimpleNamespace(params=params)
        self.marker = None if families is None else SimpleNamespace(args=families)

    def get_closest_marker(self, name):
        return self.marker


def test_the_patches_that_a_test_is_about():
    of_slime = {name for name in chosen.NAMES if name.startswith("slime.")}
    (patch,) = (patch for patch in PATCHES if patch.name == NAME)
    for item, names in (
        (Item("patches/megatron/test_train_reentry_of_bridge.py"), {NAME}),
        (Item("patches/slime/test_train_reentry.py"), {"slime.train-reentry"}),
        (Item("patches/slime/test_contract.py", ("slime",)), of_slime),
        (Item("patches/test_contract.py", ()), set(chosen.NAMES)),
        (Item("test_catalog.py", patch=patch), {NAME}),
        (Item("test_engine.py"), set()),
    ):
        assert chosen.keywords_of(item) == names
