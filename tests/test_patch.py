"""The words: what a patch declares, and seeing through replacements."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path

import pytest
from rigs.engine import make_patch

from megapatch._python.layers import MARK
from megapatch.errors import MisuseError
from megapatch.patch import Patch, Status, VerdictKind, unpatched
from megapatch.patches import PATCHES


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


@pytest.mark.parametrize("page", ["doctor.md", "writing-a-patch.md"])
def test_pages_explain_every_verdict_and_status(page):
    text = (Path(__file__).parent.parent / "docs" / page).read_text()
    names = [kind.name for kind in VerdictKind]
    words = [word.value for word in (*VerdictKind, *Status)] if page == "doctor.md" else names
    assert [word for word in words if f"`{word}`" not in text] == []


@pytest.mark.parametrize("words", [make_patch("nowhere"), make_patch("nowhere").sites[0]])
def test_patches_and_sites_are_immutable(words):
    for name in [*vars(words), "something_else"]:
        with pytest.raises(AttributeError, match="is immutable"):
            setattr(words, name, None)
    with pytest.raises(AttributeError, match="is immutable"):
        del words.module
    with pytest.raises(TypeError):
        make_patch("nowhere").sites[0].replace["other"] = None


def test_patches_and_sites_show_what_they_are():
    patch = make_patch("acme.model", "train", "Trainer.save", name="acme.twice")
    assert repr(patch) == "<Patch acme.twice at acme.model>"
    assert repr(patch.sites[0]) == "<Site acme.model: train, Trainer.save>"


def test_a_patch_that_was_pickled_or_copied_is_as_before():
    patch = PATCHES[0]
    for twin in (pickle.loads(pickle.dumps(patch)), copy.deepcopy(patch)):
        assert (twin.name, twin.doc, twin.upstream) == (patch.name, patch.doc, patch.upstream)
        assert [site.paths for site in twin.sites] == [site.paths for site in patch.sites]
        assert twin.sites[0].replace == patch.sites[0].replace
        with pytest.raises(AttributeError, match="is immutable"):
            twin.name = "other.name"


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
