"""The words: what a patch declares, and seeing through replacements."""

from __future__ import annotations

import functools

import pytest
from rigs.engine import make_patch

from megapatch.errors import MisuseError
from megapatch.patch import MARK, Patch, unpatched


def test_family_and_summary():
    patch = make_patch("nowhere", name="skyrl.grad-scale")
    assert (patch.family, patch.summary) == ("skyrl", "Greetings are loud.")


@pytest.mark.parametrize("name", ["", "megatron", "Megatron.x", "megatron.a b", "megatron."])
def test_a_name_has_a_family(name):
    with pytest.raises(MisuseError, match="family"):
        make_patch("nowhere", name=name)


def test_a_patch_has_a_site():
    with pytest.raises(MisuseError, match="no site"):
        Patch(name="a.b", doc="", upstream="", sites=())


def test_unpatched_sees_through_ours_and_what_is_on_top_of_ours_alone():
    def original(): ...

    @functools.wraps(original)
    def theirs(): ...

    @functools.wraps(theirs)
    def ours(): ...

    setattr(ours, MARK, "a.b")

    @functools.wraps(ours)
    def on_top(): ...

    assert unpatched(original) is original
    assert unpatched(theirs) is theirs  # upstream's own decorator belongs to its code
    assert unpatched(ours) is theirs
    assert unpatched(on_top) is theirs
