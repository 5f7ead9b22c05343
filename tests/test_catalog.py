"""The one list of all patches, and that each tells what a user wants to know."""

from __future__ import annotations

import sys

import pytest

from megapatch.patches import PATCHES, megatron, nemo_rl, skyrl, slime


def test_the_order_is_that_of_the_families():
    assert (*megatron.PATCHES, *nemo_rl.PATCHES, *skyrl.PATCHES, *slime.PATCHES) == PATCHES
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_patch_is_one_file_whose_docstring_tells_all(patch):
    module = sys.modules[patch.sites[0].diagnose.__module__]
    family, name = patch.name.split(".")
    assert module.__name__ == f"megapatch.patches.{family}.{name.replace('-', '_')}"
    assert patch.doc.startswith(module.__doc__)
    for section in ("Symptom  ", "Upstream ", "Seam     ", "Limits   ", "Cost     "):
        assert f"\n{section} " in patch.doc, section
    assert patch.upstream.startswith("https://github.com/")
