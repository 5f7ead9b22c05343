"""A fault at each step of an installation, one at a time: all or nothing, told, and repaired by apply()."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import types

import pytest
from rigs.engine import TARGET, louder, make_engine, make_patch, needed, status_of
from rigs.faults import CALLS, LINES, Fault

from megapatch._engine import engine, holders, install, rebuilt, record, restoring, site_record, target, watch
from megapatch._python import loaded_modules
from megapatch.patch import Patch, Site

SOURCE = f"""
from {__name__} import Actor

def greet(name):
    return "hello " + name

class Greeter:
    def greet(self, name):
        return "hello " + name

alias = greet
actor = Actor(Greeter)
"""
FILES = {module.__file__ for module in (engine, holders, install, rebuilt, record, restoring, site_record, target)}


class Actor:
    """Takes the methods that a class has when it is made, as Ray does."""

    def __init__(self, cls):
        self.cls, self.methods = cls, dict(vars(cls))


def wave(self):
    return "hello!"


def make(name):
    site = Site(
        name,
        needed,
        replace={"greet": louder, "Greeter.greet": louder},
        add={"Greeter.wave": f"{__name__}:wave"},
        rebuild=lambda module: {f"{name}:actor": lambda actor: Actor(actor.cls)},
    )
    return make_engine(Patch("test.louder", "Greetings are loud.", "https://example.com/1", sites=(site,)))


def original(module):
    """Return the contents of all places, before anything is patched."""
    return {**vars(module), **vars(module.Greeter)}


def patched(module):
    """Whether each of the places has the replacement."""
    shown = [call("you") for call in (module.greet, module.alias, module.Greeter().greet)]
    shown.append(module.actor.methods["greet"](None, "you"))
    assert set(shown) <= {"hello you", "hello you!"}  # never twice
    return {text.endswith("!") for text in shown} | {
        hasattr(module.Greeter, "wave"),
        "wave" in module.actor.methods,
    }


@pytest.fixture
def name(modules, monkeypatch):
    name = modules.write(SOURCE)
    # No sweep over all modules of the test run, for each of hundreds of faults.
    few = types.SimpleNamespace(modules=_Only(name))
    monkeypatch.setattr(loaded_modules, "sys", few)
    return name


class _Only(dict):
    def __init__(self, name):
        self.name = name

    def items(self):
        return [(self.name, sys.modules[self.name])] if self.name in sys.modules else []


@pytest.mark.parametrize(
    ("error", "events"), [(ValueError, CALLS), (MemoryError, CALLS), (KeyboardInterrupt, LINES)]
)
@pytest.mark.parametrize("imported", [True, False])
def test_all_or_nothing_and_repaired(name, error, events, imported):
    met = set()
    for k in range(10_000):
        sys.modules.pop(name, None)
        patching, fault, raised = make(name), Fault(error("a fault"), events, k, FILES, site_record.consider), None
        if imported:
            before = original(module := importlib.import_module(name))
        else:
            patching.activate()
        try:
            with fault:
                patching.activate() if imported else importlib.import_module(name)
        except KeyboardInterrupt:
            raised = KeyboardInterrupt
        if not fault.met:
            break
        assert raised is (error if error is KeyboardInterrupt else None)
        if raised and not imported:
            assert name not in sys.modules
        module = importlib.import_module(name)
        (record,) = patching.records
        record.refresh()
        assert len(patched(module)) == 1, fault.met
        (all_of_it,) = patched(module)
        met.add((all_of_it, record.status.value))
        if record.status.value == "failed":
            assert "a fault" in record.traceback and record.reason == f"{error.__name__}: a fault"
        patching.apply()
        record.refresh()
        assert (patched(module), record.status.value) == ({True}, "applied"), fault.met
        if imported:
            patching.restore()
            assert original(module) == before
    assert k > 50
    expected = {(True, "applied")}
    if error is not KeyboardInterrupt:
        expected.add((False, "failed"))
    if imported:  # an import that a fault ends is repeated instead, and patched
        expected.add((False, "missed"))
    assert met == expected


@pytest.mark.parametrize(
    ("error", "events"), [(ValueError, CALLS), (MemoryError, CALLS), (KeyboardInterrupt, LINES)]
)
def test_restoring_is_all_or_nothing_and_can_be_repeated(name, error, events):
    met = set()
    for k in range(10_000):
        sys.modules.pop(name, None)
        before, patching = original(module := importlib.import_module(name)), make(name)
        patching.activate()
        fault = Fault(error("a fault"), events, k, FILES, engine.Engine._restore)
        with contextlib.suppress(error), fault:
            patching.restore()
        if not fault.met:
            break
        met.add((*patched(module), status_of(patching)))
        patching.apply()
        assert (patched(module), status_of(patching)) == ({True}, "applied"), fault.met
        patching.restore()
        assert original(module) == before, fault.met
    assert k > 30
    assert met == {(True, "applied"), (False, "disabled")}


@pytest.mark.parametrize("deed", ["apply", "restore"])
def test_what_a_rollback_that_failed_has_left_is_undone_first(name, monkeypatch, deed):
    def fail(self):
        raise ValueError("a fault")

    before, patching = original(module := importlib.import_module(name)), make(name)
    with monkeypatch.context() as faults:
        faults.setattr(rebuilt.RebuiltTarget, "install", fail)
        faults.setattr(target.ReplacedTarget, "revert", fail)
        patching.activate()
    assert (patched(module), status_of(patching)) == ({True, False}, "failed")
    if deed == "apply":
        patching.apply()
        assert (patched(module), status_of(patching)) == ({True}, "applied")
    patching.restore()
    assert original(module) == before


def test_what_a_restore_that_could_not_be_undone_has_left_is_repaired(name, monkeypatch):
    def fail(self, *replacement):
        raise ValueError("a fault")

    before, patching = original(module := importlib.import_module(name)), make(name)
    patching.activate()
    with monkeypatch.context() as faults:
        faults.setattr(rebuilt.RebuiltTarget, "revert", fail)
        faults.setattr(target.ReplacedTarget, "put_back", fail)
        with pytest.raises(ValueError, match="a fault"):
            patching.restore()
    assert (patched(module), status_of(patching)) == ({True, False}, "failed")
    patching.apply()
    assert (patched(module), status_of(patching)) == ({True}, "applied")
    patching.restore()
    assert original(module) == before


def test_an_import_that_is_interrupted_leaves_the_next_one_watched(modules, monkeypatch):
    """At each line of the package and of the engine, in one process: nothing wears out."""
    package = modules.folder / "megapatch_test_package"
    package.mkdir()
    (package / "__init__.py").write_text("from . import low, high\n" + TARGET)
    (package / "low.py").write_text(TARGET)
    (package / "high.py").write_text("from megapatch_test_package.low import greet\nshout = greet\n" + TARGET)
    names = [package.name, f"{package.name}.low", f"{package.name}.high"]
    modules.names += names
    patching = make_engine(
        make_patch(names[0], "greet", "low.Greeter.greet", name="test.package"),
        make_patch(names[1], name="test.low"),
        make_patch(names[2], name="test.high"),
    )
    patching.activate()
    monkeypatch.setattr(loaded_modules, "sys", types.SimpleNamespace(modules={}))
    files = FILES | {watch.__file__} | {str(file) for file in package.iterdir()}
    for k in range(10_000):
        patching.restore()
        for name in names:
            sys.modules.pop(name, None)
        patching.apply()
        fault = Fault(KeyboardInterrupt(), LINES, k, files, once=True)
        with contextlib.suppress(KeyboardInterrupt), fault:
            importlib.import_module(package.name)
        if not fault.met:
            break
        importlib.import_module(package.name)
        found = [sys.modules[name].greet("you") for name in names]
        found.append(sys.modules[names[1]].Greeter().greet("you"))  # the package may lack the attribute
        assert found == ["hello you!"] * 4, fault.met
        assert [status_of(patching, number) for number in range(3)] == ["applied"] * 3, fault.met
    assert k > 150


def test_an_interrupted_search_leaves_none_of_several_sites_patched(modules, monkeypatch):
    names = [modules.write(TARGET), modules.write(TARGET, stem="other")]
    targets = [importlib.import_module(name) for name in names]
    patching = make_engine(
        *(make_patch(name, name=f"test.{label}") for name, label in zip(names, "ab", strict=True))
    )

    def interrupted(held):
        raise KeyboardInterrupt

    monkeypatch.setattr(site_record, "find_holders", interrupted)
    with pytest.raises(KeyboardInterrupt):
        patching.activate()
    monkeypatch.undo()
    assert [target.greet("you") for target in targets] == ["hello you"] * 2
    patching.apply()
    assert [target.greet("you") for target in targets] == ["hello you!"] * 2


def test_a_diagnosis_that_imports_another_target_installs_once(modules):
    other, name = modules.write(TARGET, stem="other"), modules.write(TARGET)

    def diagnose(module):
        importlib.import_module(other)
        return needed(module)

    target = importlib.import_module(name)
    make_engine(make_patch(name, diagnose=diagnose), make_patch(other, name="test.other")).activate()
    assert target.greet("you") == importlib.import_module(other).greet("you") == "hello you!"


def test_activation_while_another_thread_is_still_looking_for_the_file(modules, monkeypatch):
    make_engine(make_patch("nowhere")).activate()  # our finder is there, and knows nothing of the target
    name, looking, go_on = modules.write(TARGET), threading.Event(), threading.Event()

    class Slow:
        def find_spec(self, wanted, path=None, target=None):
            if wanted == name:
                looking.set()
                assert go_on.wait(10)

    monkeypatch.setattr(sys, "meta_path", [sys.meta_path[0], Slow(), *sys.meta_path[1:]])
    patching = make_engine(make_patch(name))
    importer = threading.Thread(target=importlib.import_module, args=(name,))
    activator = threading.Thread(target=patching.activate)
    importer.start()
    assert looking.wait(10)
    activator.start()
    activator.join(0.1)
    go_on.set()
    importer.join(10)
    activator.join(10)
    assert sys.modules[name].greet("you") == "hello you!"
