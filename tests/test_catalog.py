"""The one list of all patches, and that each tells what a user wants to know."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

from megapatch import patches
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
