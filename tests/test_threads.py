"""Threads that import, diagnose and apply at the same time."""

from __future__ import annotations

import importlib
import sys
import threading
import types

import pytest
from rigs.engine import TARGET, make_engine, make_patch, needed, status_of

from megapatch._engine import watch

SECONDS = 30.0  # after which a thread counts as one that waits for ever


@pytest.fixture
def shared(monkeypatch):
    module = types.ModuleType("megapatch_test_shared")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_diagnosis_that_imports_what_another_thread_is_importing(modules, shared, monkeypatch):
    shared.diagnosing, shared.importing = threading.Event(), threading.Event()
    first = types.ModuleType("megapatch_test_first")  # loaded without an event for its hooks
    exec(TARGET, vars(first))
    monkeypatch.setitem(sys.modules, first.__name__, first)
    second = modules.write(
        "from megapatch_test_shared import diagnosing, importing\n"
        f"importing.set()\nassert diagnosing.wait({SECONDS})\n{TARGET}"
    )

    def diagnose(module):
        shared.diagnosing.set()
        importlib.import_module(second)  # which waits for the other thread, and that one for nothing of ours
        return needed(module)

    engine = make_engine(make_patch(first.__name__, diagnose=diagnose), make_patch(second, name="test.second"))
    importer = threading.Thread(target=importlib.import_module, args=(second,), daemon=True)
    activator = threading.Thread(target=engine.activate, daemon=True)
    engine._watch(second)
    importer.start()
    assert shared.importing.wait(SECONDS)
    activator.start()
    for thread in (importer, activator):
        thread.join(SECONDS)
    assert not importer.is_alive() and not activator.is_alive()
    assert [status_of(engine, 0), status_of(engine, 1)] == ["applied", "applied"]


def test_apply_does_not_repeat_an_import_that_fails_in_another_thread(modules, shared, monkeypatch):
    shared.runs, shared.started, shared.looked = [], threading.Event(), threading.Event()
    name = modules.write(
        "import megapatch_test_shared as shared\n"
        "shared.runs.append(1)\nshared.started.set()\n"
        f"assert shared.looked.wait({SECONDS})\nraise RuntimeError('no GPU')\n"
    )
    engine = make_engine(make_patch(name))
    failures = []

    def importing():
        try:
            importlib.import_module(name)
        except RuntimeError as error:
            failures.append(str(error))

    half_loaded = watch.half_loaded

    def half_loaded_and_noted(module):
        found = half_loaded(module)
        if found:
            shared.looked.set()
        return found

    monkeypatch.setattr(watch, "half_loaded", half_loaded_and_noted)
    importer = threading.Thread(target=importing, daemon=True)
    importer.start()
    assert shared.started.wait(SECONDS)
    engine.apply()
    importer.join(SECONDS)
    assert (failures, shared.runs) == (["no GPU"], [1])
    assert status_of(engine) == "pending"
