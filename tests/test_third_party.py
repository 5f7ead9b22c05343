"""Patches of other distributions, by entry point; and megapatch's own, loaded with one of their targets."""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import json
import logging
import os
import sys
import types

import pytest
from rigs.command import run
from rigs.engine import TARGET, make_patch, status_of

from megapatch._engine import strict, third_party
from megapatch._engine.engine import Engine, _third_parties, own_patches
from megapatch._engine.record import Unloaded
from megapatch._engine.restoring import matching_names
from megapatch._engine.settings import Settings
from megapatch._reporting.report import make_report
from megapatch.errors import StrictError
from megapatch.patch import PatchInfo
from megapatch.patches import _catalogue

PATCHES = """
from rigs.engine import make_patch
LOUDER = make_patch({target!r}, name="acme.louder")
BOTH = [LOUDER, make_patch({target!r}, "Greeter.greet", name="acme.method")]
NEITHER = "a text"
NONE = []
"""

_numbers = itertools.count()


@pytest.fixture
def distribute(modules, monkeypatch):
    """Installs a distribution with one entry point."""

    def install(watched, value, name="Acme_Megatron"):
        folder = modules.folder / f"site{next(_numbers)}"
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[megapatch.patches]\n{watched} = {value}\n")
        monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])  # where installations are
        importlib.invalidate_caches()
        return folder

    return install


@pytest.fixture
def target(modules):
    return modules.write(TARGET)


@pytest.fixture
def patches(modules, target):
    return modules.write(PATCHES.format(target=target), stem="acme")


def make_engine(*own, **settings):
    chosen = Settings(**settings)
    return Engine(own, chosen, third_party.records(chosen))


def told(engine):
    return {
        one.patch.name: (site.status.value, site.reason)
        for one in make_report(engine.records).patches
        for site in one.sites
    }


def test_its_patches_are_loaded_with_the_module_that_they_watch(distribute, target, patches):
    distribute(target, f"{patches}:BOTH")
    engine = make_engine()
    engine.activate()
    assert patches not in sys.modules
    assert told(engine) == {"third_party.acme-megatron": ("pending", "not imported yet")}
    module = importlib.import_module(target)
    assert module.greet("you") == module.Greeter().greet("you") == "hello you!"
    assert {name: status for name, (status, _) in told(engine).items()} == {
        "acme.louder": "applied",
        "acme.method": "applied",
    }
    engine.restore("acme.*")
    assert module.greet("you") == "hello you"


def test_odd_entries_of_the_path_are_skipped(distribute, target, patches, monkeypatch):
    distribute(target, f"{patches}:LOUDER")
    monkeypatch.setattr(sys, "path", [None, *sys.path, b"bytes", 3])
    assert [record.name for record in make_engine().records] == ["third_party.acme-megatron"]


def test_metadata_are_not_read_where_no_folder_mentions_the_group(monkeypatch, tmp_path):
    """Reading them takes longer than all else that importing megapatch does."""
    (info := tmp_path / "other-1.0.dist-info").mkdir()
    (info / "entry_points.txt").write_text("[console_scripts]\nother = other:main\n")
    monkeypatch.setattr(sys, "path", [os.path.dirname(os.__file__), str(tmp_path)])
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **kwargs: pytest.fail("metadata were read"))
    assert list(_third_parties(Settings())) == []


def test_a_finder_that_fails_is_said(monkeypatch, caplog):
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **kwargs: [][0])
    assert third_party.entry_points() == []
    assert "megapatch.patches could not be read in the distributions: IndexError" in caplog.text


def test_of_two_distributions_with_one_name_the_first_on_the_path_counts(distribute, target, patches):
    for value, name in (("LOUDER", "Acme_Megatron"), ("BOTH", "acme.megatron"), ("BOTH", "Another")):
        distribute(target, f"{patches}:{value}", name)
    first, other = third_party.entry_points()
    assert (first.value, other.dist.name) == (f"{patches}:LOUDER", "Another")


def test_a_module_that_was_imported_before(distribute, target, patches):
    distribute(target, f"{patches}:LOUDER")
    module = importlib.import_module(target)
    engine = make_engine()
    engine.activate()
    assert module.greet("you") == "hello you!"
    engine.activate()
    engine.apply()
    assert module.greet("you") == "hello you!"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (
            "{patches}:NEITHER",
            "TypeError: {patches}:NEITHER is 'a text'; expected a megapatch.Patch or a tuple of them",
        ),
        ("{patches}:NONE", "TypeError: {patches}:NONE is []; expected a megapatch.Patch or a tuple of them"),
        ("{patches}:MISSING", "AttributeError: module '{patches}' has no attribute 'MISSING'"),
        ("megapatch_no_such_module:PATCH", "ModuleNotFoundError: No module named 'megapatch_no_such_module'"),
    ],
)
def test_a_broken_one_is_isolated_and_reported(distribute, target, patches, caplog, value, reason):
    distribute(target, value.format(patches=patches))
    engine = make_engine(make_patch(target))
    engine.activate()
    assert importlib.import_module(target).greet("you") == "hello you!"
    engine.apply()
    assert told(engine)["third_party.acme-megatron"] == ("failed", reason.format(patches=patches))
    assert told(engine)["test.louder"][0] == "applied"
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "third_party.acme-megatron" in warning.message and "Traceback" in warning.message


def test_two_patches_of_one_name_do_not_add_up(distribute, target, patches, caplog):
    distribute(target, f"{patches}:LOUDER")
    engine = make_engine(make_patch(target, name="acme.louder"))
    engine.activate()
    assert importlib.import_module(target).greet("you") == "hello you!"
    statuses = [record.status.value for record in engine.records]
    assert statuses == ["applied", "failed"]
    assert "there is another patch called acme.louder; this one stays off" in caplog.text


def test_one_patch_by_two_entry_points_is_one(distribute, modules, target, patches):
    distribute(target, f"{patches}:LOUDER")
    distribute(target, f"{patches}:LOUDER", name="acme_again")
    engine = make_engine()
    engine.activate()
    assert importlib.import_module(target).greet("you") == "hello you!"
    assert told(engine) == {"acme.louder": ("applied", "it is too quiet")}


def test_switched_off_it_is_not_even_loaded(distribute, target, patches):
    distribute(target, f"{patches}:LOUDER")
    engine = make_engine(disable=("third_party.*",))
    engine.activate()
    assert importlib.import_module(target).greet("you") == "hello you"
    assert patches not in sys.modules
    assert told(engine)["third_party.acme-megatron"][0] == "disabled"


@pytest.mark.parametrize(
    ("settings", "greeting"),
    [
        ({"only": ("acme.*",)}, "hello you!"),
        ({"only": ("test.*",)}, "hello you"),
        ({"disable": ("acme.*",)}, "hello you"),
    ],
)
def test_its_patches_are_switched_by_their_own_names(distribute, target, patches, caplog, settings, greeting):
    distribute(target, f"{patches}:LOUDER")
    engine = make_engine(make_patch("nowhere"), **settings)
    engine.activate()
    assert importlib.import_module(target).greet("you") == greeting
    assert "no patch is called" not in caplog.text


def test_until_it_is_loaded_it_may_change_numbers(distribute, target, patches):
    distribute(target, f"{patches}:LOUDER")
    engine = make_engine(own := make_patch("nowhere"))
    assert matching_names(engine.roster, ["@same-numbers"]) == [own.name]


def test_an_unknown_name_is_said_once_all_are_loaded(distribute, target, patches, caplog):
    distribute(target, f"{patches}:LOUDER")
    make_engine(disable=("acme.lauder",), strict_value="perhaps").activate()
    assert "no patch is called" not in caplog.text
    importlib.import_module(target)
    assert "MEGAPATCH_DISABLE: no patch is called 'acme.lauder'; did you mean acme.louder?" in caplog.text
    assert caplog.text.count("perhaps is neither 1 nor 0") == 1


@pytest.mark.parametrize("name", ["test", "test.lauder", "louder"])
def test_a_name_that_cannot_be_theirs_is_said_before_they_are_loaded(distribute, target, patches, caplog, name):
    distribute(target, f"{patches}:LOUDER")
    make_engine(make_patch("nowhere"), disable=(name,)).activate()
    assert f"MEGAPATCH_DISABLE: no patch is called '{name}'" in caplog.text
    importlib.import_module(target)
    assert caplog.text.count("no patch is called") == 1


def test_metadata_that_cannot_be_read_is_passed_over(distribute, target, patches, caplog):
    folder = distribute(target, f"{patches}:LOUDER")
    (next(folder.iterdir()) / "entry_points.txt").write_text("[megapatch.patches]\nno equals sign\n[[")
    engine = make_engine(make_patch(target))
    engine.activate()
    assert importlib.import_module(target).greet("you") == "hello you!"


def test_the_command_line_knows_them(distribute, modules, target, patches, pytestconfig):
    folder = distribute(target, f"{patches}:LOUDER")
    path = f"{folder}:{modules.folder}:{pytestconfig.rootpath / 'tests'}"
    assert "acme.louder" in run("list", path=path).stdout
    assert "Symptom   whispers" in run("explain", "acme.louder", path=path).stdout
    # What is switched off is not imported: a real Megatron takes long.
    shown = json.loads(run("doctor", "--json", path=path, MEGAPATCH_DISABLE="megatron.*").stdout)
    assert {one["name"]: one["status"] for one in shown["patches"]}["acme.louder"] == "applied"


# ------------------------------------------------------------------------ megapatch's own patches
@pytest.fixture
def family(modules, monkeypatch):
    """Makes a catalogue of one family, with two patches, each of one module."""
    first, second = modules.write(TARGET), modules.write(TARGET, stem="second")
    named = {"test.first": (first,), "test.second": (second,)}
    patches = {name: make_patch(*watched, name=name) for name, watched in named.items()}
    monkeypatch.setattr(_catalogue, "CATALOGUE", {"test": named})

    def load(name):
        loads.append(name)
        return patches[name]

    loads = []
    monkeypatch.setattr(_catalogue, "of_name", load)
    return types.SimpleNamespace(first=first, second=second, loads=loads)


def activated(*others, **settings):
    engine = Engine((), Settings(**settings), [*own_patches(), *others])
    engine.activate()
    return engine


def shown(engine):
    return {
        (one.patch.name, site.module): (site.status.value, site.reason)
        for one in make_report(engine.records).patches
        for site in one.sites
    }


def test_each_is_loaded_with_the_first_of_its_targets(family):
    engine = activated()
    assert not family.loads and not engine.patches
    assert shown(engine)["test.first", family.first] == ("pending", "not imported yet")
    assert importlib.import_module(family.second).greet("you") == "hello you!"
    assert family.loads == ["test.second"]
    assert importlib.import_module(family.first).greet("you") == "hello you!"
    assert family.loads == ["test.second", "test.first"]
    assert [patch.name for patch in engine.patches] == ["test.first", "test.second"]


def test_each_that_cannot_be_loaded_is_said_once_and_breaks_nothing(family, monkeypatch, caplog):

    def broken(name):
        raise SyntaxError("in a patch")

    monkeypatch.setattr(_catalogue, "of_name", broken)
    engine = activated()
    assert importlib.import_module(family.first).greet("you") == "hello you"
    assert importlib.import_module(family.second).greet("you") == "hello you"
    engine.load_all()
    engine.apply()
    failed = ("failed", "SyntaxError: in a patch")
    assert shown(engine) == {("test.first", family.first): failed, ("test.second", family.second): failed}
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    for name, warning in zip(("test.first", "test.second"), warnings, strict=True):
        assert warning.startswith(
            f"{name}: megapatch.patches.test is failed: SyntaxError: in a patch (see https://"
        )
        assert "troubleshooting.md#failed)\n  Traceback" in warning


def test_strict_keeps_out_the_targets_of_one_that_cannot_be_loaded(family, monkeypatch):
    monkeypatch.setattr(strict, "_finder", strict._KeepsOut())
    monkeypatch.setattr(_catalogue, "of_name", lambda name: 1 / 0)
    engine = activated(strict_value="1")
    for name in (family.first, family.first, family.second):
        with pytest.raises(StrictError, match="division by zero"):
            importlib.import_module(name)
    with pytest.raises(StrictError, match="division by zero"):
        engine.apply()


def test_restored_before_its_targets_are_imported_it_stays_away(family):
    engine = activated()
    engine.restore("test.first")
    assert importlib.import_module(family.first).greet("you") == "hello you"
    assert importlib.import_module(family.second).greet("you") == "hello you!"


def test_a_patch_of_others_with_the_name_of_one_of_ours_does_not_replace_it(family, modules):
    other = modules.write(TARGET, stem="other")
    theirs = make_patch(other, name="test.first")
    known = (PatchInfo("third_party.acme", "", "", (other,)),)
    engine = activated(Unloaded("third_party.acme", other, known, lambda: [theirs], names_are_known=False))
    assert importlib.import_module(other).greet("you") == "hello you"
    assert importlib.import_module(family.first).greet("you") == "hello you!"
    assert [status_of(engine, position) for position in range(3)] == ["applied", "pending", "failed"]
