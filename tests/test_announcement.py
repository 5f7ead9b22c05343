"""The INFO line that says which patches were applied, and where."""

from __future__ import annotations

import importlib
import logging

import pytest
from rigs.engine import TARGET, activated, make_engine, make_patch


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO)
    return lambda: [record.message for record in caplog.records if record.levelno == logging.INFO]


def test_it_names_the_patches_and_the_module_once(modules, said):
    name = modules.write(TARGET)
    engine = activated(
        make_patch(name), make_patch(name, "Greeter.greet", name="test.method", changes_numbers=True)
    )
    assert said() == []  # nothing is applied to a module that nobody has imported
    importlib.import_module(name)
    engine.activate()
    engine.apply()
    assert said() == [f"megapatch applied test.louder, test.method (changes numbers) to {name}"]


def test_where_the_module_is_there_already(modules, said):
    name = modules.write(TARGET)
    importlib.import_module(name)
    make_engine(make_patch(name)).activate()
    assert said() == [f"megapatch applied test.louder to {name}"]


def test_nothing_is_said_of_what_is_off_or_not_installed(modules, said):
    name = modules.write(TARGET)
    importlib.import_module(name)
    make_engine(make_patch(name), make_patch("nowhere", name="test.nowhere"), disable=("test.louder",)).activate()
    assert said() == []


def test_modules_that_import_each_other_are_one_line(modules, said):
    inner = modules.write(TARGET)
    outer = modules.write(f"import {inner}\n{TARGET}")
    activated(make_patch(inner), make_patch(outer, name="test.outer"))
    importlib.import_module(outer)
    assert said() == [f"megapatch applied test.louder to {inner}; test.outer to {outer}"]


def test_what_is_too_long_for_a_line_is_counted(modules, said):
    names = [modules.write(TARGET) for _ in range(4)]
    patches = {f"test.{'long-' * 12}{number}": name for number, name in enumerate(names)}
    outer = modules.write("".join(f"import {name}\n" for name in names) + TARGET)
    make_engine(
        *(make_patch(name, name=patch, changes_numbers=name == names[0]) for patch, name in patches.items()),
        make_patch(outer, name="test.outer"),
    ).activate()
    importlib.import_module(outer)
    (message,) = said()
    first, *lines = message.splitlines()
    assert first == "megapatch applied 5 patches to 5 modules, 1 of which may change numbers:"
    applied = [f"  {patch} to {name}" for patch, name in patches.items()]
    applied[0] = applied[0].replace(" to", " (changes numbers) to")
    assert lines == [*applied, f"  test.outer to {outer}"]


def test_what_no_handler_has_taken_comes_with_the_first_message_that_one_takes(modules, caplog):
    targets = {name: modules.write(TARGET) for name in ("test.first", "test.second", "test.third")}
    first, second, third = targets.values()
    engine = activated(*(make_patch(target, name=name) for name, target in targets.items()))
    for name in (first, second):
        importlib.import_module(name)
    assert not caplog.records
    engine.restore("test.second")
    caplog.set_level(logging.INFO)
    importlib.import_module(third)
    (record,) = caplog.records
    assert record.message == f"megapatch applied test.first to {first}; test.third to {third}"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_0_announces(modules, said, monkeypatch, rank):
    monkeypatch.setenv("RANK", rank)
    name = modules.write(TARGET)
    activated(make_patch(name))
    importlib.import_module(name)
    assert len(said()) == (rank == "0")


def test_an_outer_import_that_fails_keeps_nothing_back(modules, said):
    inner = modules.write(TARGET)
    outer = modules.write(f"import {inner}\nraise RuntimeError\n")
    engine = activated(make_patch(inner), make_patch(outer, name="test.outer"))
    with pytest.raises(RuntimeError):
        importlib.import_module(outer)
    engine.apply()
    assert said() == [f"megapatch applied test.louder to {inner}"]
