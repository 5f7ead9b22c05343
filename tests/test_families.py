"""megapatch's own patches: loaded with one of their targets, or not to be loaded, or imitated by others."""

from __future__ import annotations

import importlib
import logging
import types

import pytest
from rigs.engine import TARGET, make_patch, status_of

from megapatch._engine import strict
from megapatch._engine.engine import Engine, own_patches
from megapatch._engine.record import Unloaded
from megapatch._engine.settings import Settings
from megapatch._reporting.report import make_report
from megapatch.errors import StrictError
from megapatch.patch import PatchInfo
from megapatch.patches import _catalogue


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
