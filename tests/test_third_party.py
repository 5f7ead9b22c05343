"""Patches of other distributions, by entry point."""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import json
import os
import sys

import pytest
from rigs.command import run
from rigs.engine import TARGET, make_patch

from megapatch._engine import third_party
from megapatch._engine.engine import Engine
from megapatch._engine.restoring import matching_names
from megapatch._engine.settings import Settings
from megapatch._reporting.report import make_report

PATCHES = """
from rigs.engine import make_patch
LOUDER = make_patch({target!r}, name="acme.louder")
BOTH = [LOUDER, make_patch({target!r}, "Greeter.greet", name="acme.method")]
NEITHER = "a text"
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
    assert third_party.entry_points(Settings()) == []


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
