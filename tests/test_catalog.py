"""What a patch declares, and the one list of all patches: each tells what a user wants to know."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pickle
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rigs.engine import make_patch

from megapatch import patches
from megapatch._python.layers import MARK
from megapatch.errors import MisuseError
from megapatch.patch import ABSENT, Patch, Status, VerdictKind, unpatched
from megapatch.patches import PATCHES
from megapatch.patches._catalogue import CATALOGUE, RETIRED, of_family


def test_the_catalogue_names_what_is_there():
    for family, named in CATALOGUE.items():
        there = {
            patch.name: tuple(dict.fromkeys(site.module for site in patch.sites)) for patch in of_family(family)
        }
        assert list(named.items()) == list(there.items()), (
            f"in megapatch/patches/_catalogue.py {family} has to be {there}: cd tests && python -m pages"
        )
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)


def test_a_removed_patch_has_no_file():
    assert not RETIRED.keys() & {name for named in CATALOGUE.values() for name in named}


def test_a_patch_imports_no_other_patch():
    """So that each can be removed by itself; shared code has an underscore."""
    found = [
        (path.name, source)
        for path in Path(patches.__file__).parent.glob("*/*.py")
        for source in re.findall(r"^ *from \.+([a-z]\w*(?:\.\w+)*) import", path.read_text(), re.MULTILINE)
        if source not in ("patch", "errors", "weight_sync", "train_step") and "._" not in source
    ]
    assert found == []


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_patch_is_one_file_whose_docstring_tells_all(patch):
    family, name = patch.name.split(".")
    module = sys.modules[f"megapatch.patches.{family}.{name.replace('-', '_')}"]
    assert module.PATCH is patch
    assert patch.doc.startswith(module.__doc__)
    for section in ("Symptom  ", "Upstream ", "Seam     ", "Limits   ", "Cost     "):
        assert f"\n{section} " in patch.doc, section
    reported = patch.upstream is not None
    assert reported is ("\nUpstream  not reported" not in patch.doc)
    if reported:
        assert patch.upstream.startswith("https://github.com/")
        told = patch.doc.partition("\nUpstream  ")[2].partition("\nSeam  ")[0]
        assert patch.upstream.rpartition("/")[2] in told, f"{patch.upstream} is not in: {told}"
    assert not patch.changes_numbers or "\nNumbers  " in patch.doc


def test_each_site_of_megatron_replaces_something():
    sites = [site for patch in PATCHES if patch.family == "megatron" for site in patch.sites]
    assert [site.module for site in sites if not site.replace] == []


def test_each_diagnosis_refuses_code_that_has_nothing_of_what_it_looks_for():
    """Without torch or Megatron: each looks for names before it runs anything."""
    found = {
        (patch.name, site.module): site.diagnose(ModuleType(site.module))
        for patch in PATCHES
        for site in patch.sites
    }
    known_to_lack_it = {("megatron.save-fails-everywhere", "megatron.core.dist_checkpointing.validation")}
    assert {site for site, verdict in found.items() if verdict.kind is ABSENT} == known_to_lack_it
    refused = {site for site, verdict in found.items() if verdict.reason.startswith("expected but not found: ")}
    assert found.keys() - refused == known_to_lack_it


def test_a_patch_has_one_site_in_a_module():
    """Reports, ranks that compare themselves and the table of verdicts know a site by its patch and its module."""
    for patch in PATCHES:
        modules = [site.module for site in patch.sites]
        assert len(modules) == len(set(modules)), patch.name


ADDED = [(path, added) for patch in PATCHES for site in patch.sites for path, added in site.add.items()]


@pytest.mark.parametrize(("path", "added"), ADDED, ids=[f"{path} <- {added}" for path, added in ADDED])
def test_every_added_function_is_where_its_name_says(path, added):
    """Names of helper modules are put together from strings, and pickled worker classes refer to them."""
    module, name = added.split(":")
    function = getattr(importlib.import_module(module), name)
    assert inspect.isfunction(function)
    assert (function.__module__, function.__qualname__) == (module, name)


def test_some_functions_are_added():
    assert len(ADDED) > 20


# ------------------------------------------------------------------------ what a patch declares
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
