"""Modules that are loaded unpatched: patched when something else is imported, and never called pending."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys

import pytest
from rigs.engine import TARGET, make_engine, make_patch, status_of

from megapatch._engine import strict
from megapatch.errors import StrictError


class LoadsItself:
    """An import hook that loads modules itself, as typeguard's and jaxtyping's do, first on sys.meta_path."""

    def __init__(self, *names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.PathFinder.find_spec(name, path, target) if name in self.names else None


@pytest.fixture
def in_front(monkeypatch):
    def install(*names):
        sys.meta_path.insert(0, LoadsItself(*names))

    before = list(sys.meta_path)
    yield install
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, LoadsItself)]
    assert set(map(id, before)) <= set(map(id, sys.meta_path))


def test_behind_another_import_hook_it_is_missed_until_the_next_import(modules, in_front, caplog):
    name, another, nothing = modules.write(TARGET), modules.write(""), modules.write("", stem="later")
    engine = make_engine(make_patch(name))
    engine.activate()
    in_front(name)
    target = importlib.import_module(name)
    assert target.greet("you") == "hello you"
    assert status_of(engine) == "missed"
    assert f"{name} is missed: loaded, and not patched" in caplog.text
    importlib.import_module(another)
    assert target.greet("you") == "hello you!"
    assert status_of(engine) == "applied"
    assert importlib.import_module(nothing)


def test_an_import_in_between_puts_megapatch_in_front_again(modules, in_front):
    name, another = modules.write(TARGET), modules.write("")
    engine = make_engine(make_patch(name))
    engine.activate()
    in_front(name)
    importlib.import_module(another)
    assert importlib.import_module(name).greet("you") == "hello you!"


def test_an_import_that_fails_in_between_as_well(modules, in_front):
    name, another = modules.write(TARGET), modules.write("1 / 0")
    engine = make_engine(make_patch(name))
    engine.activate()
    in_front(name)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("megapatch_no_such_module")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(another)
    assert importlib.import_module(name).greet("you") == "hello you!"


def test_the_other_hook_still_loads_its_modules(modules, in_front):
    """Its finder is asked after ours, and its loader is used."""
    name, another = modules.write(TARGET), modules.write("")
    seen = []

    class Loader(importlib.machinery.SourceFileLoader):
        def exec_module(self, module):
            seen.append(module.__name__)
            super().exec_module(module)

    class Finder(LoadsItself):
        def find_spec(self, name, path=None, target=None):
            spec = super().find_spec(name, path, target)
            if spec is not None:
                spec.loader = Loader(name, spec.origin)
            return spec

    engine = make_engine(make_patch(name))
    engine.activate()
    sys.meta_path.insert(0, finder := Finder(name))
    try:
        importlib.import_module(another)
        assert importlib.import_module(name).greet("you") == "hello you!"
    finally:
        sys.meta_path.remove(finder)
    assert seen == [name]


def test_what_was_put_into_sys_modules_by_hand_is_missed_until_apply(modules, tmp_path):
    name = modules.write(TARGET)
    engine = make_engine(make_patch(name))
    engine.activate()
    spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert status_of(engine) == "missed"
    engine.apply()
    assert status_of(engine) == "applied"
    assert module.greet("you") == "hello you!"


def test_a_patch_of_others_below_ours_that_is_undone(modules, caplog):
    """Without functools.wraps it looks as a reload does: the module's own function is there again."""
    target = importlib.import_module(name := modules.write(TARGET))
    greet = target.greet
    target.greet = lambda name: greet(name) + "?"
    engine = make_engine(make_patch(name))
    engine.activate()
    assert target.greet("you") == "hello you?!"
    target.greet = greet
    assert status_of(engine) in ("missed", "overwritten")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    engine.apply()
    assert status_of(engine) == "applied"
    assert target.greet("you") == "hello you!"


def test_strict_raises_where_a_late_look_finds_what_needs_attention(modules, in_front, monkeypatch):
    monkeypatch.setattr(strict, "_finder", strict._KeepsOut())
    name, another = modules.write(TARGET), modules.write("")

    def factory(original):
        raise ZeroDivisionError("a bug of ours")

    engine = make_engine(make_patch(name, factory=factory), strict_value="1")
    engine.activate()
    in_front(name)
    importlib.import_module(name)
    with pytest.raises(StrictError, match="a bug of ours"):
        importlib.import_module(another)


def test_reloads_are_not_remembered_for_ever(modules):
    target = importlib.import_module(name := modules.write(TARGET))
    engine = make_engine(make_patch(name, "greet", "Greeter.greet"))
    engine.activate()
    sizes = []
    for _ in range(30):
        importlib.reload(target)
        engine.apply()
        sizes.append(len(engine.records[0]._earlier))
    assert target.greet("you") == "hello you!"
    assert sizes[-1] == sizes[-10] > 2
