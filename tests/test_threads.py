"""Threads that import, diagnose and apply at the same time."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
from rigs.engine import TARGET, make_engine, make_patch, needed, status_of

import megapatch
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


AT_ONCE = """
import importlib, importlib.machinery, os, sys, threading, time
from rigs.engine import make_engine, make_patch, status_of

class InFront:  # as pytest's
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.PathFinder.find_spec(name, path, target)

def start(function, *args):
    threads.append(threading.Thread(target=function, args=args, daemon=True))
    threads[-1].start()
    time.sleep(0.03)

for order, package in enumerate(sys.argv[1:]):
    names = package, f"{package}.sub"
    engine = make_engine(*(make_patch(name, name=f"test.{name[-3:]}") for name in names))
    threads = []
    if order < 3:
        engine.activate()
    if order == 2:
        sys.meta_path.insert(0, InFront())
    for number in range(8 if order == 1 else 2):
        start(importlib.import_module, names[number % 2])
    if order == 3:  # as a worker of Ray, which loads its actors in other threads than the main one
        start(engine.activate)
    for thread in threads:
        thread.join(10)
    if any(thread.is_alive() for thread in threads):
        print(f"{package}: they wait for each other", flush=True)
        os._exit(1)  # the import lock is held
    engine.apply()
    print(package, sys.modules[names[1]].greet("you"), status_of(engine, 0), status_of(engine, 1))
"""


def test_threads_that_import_a_package_and_its_module_at_once(tmp_path):
    packages = ["two", "eight", "third", "meanwhile"]
    for package in packages:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(
            f"import time\ntime.sleep(0.3)\nfrom . import sub\n{TARGET}"
        )
        (tmp_path / package / "sub.py").write_text(TARGET)
    path = [str(tmp_path), str(Path(__file__).parent), str(Path(megapatch.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", AT_ONCE, *packages],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines() == [f"{package} hello you! applied applied" for package in packages], (
        done.stderr
    )


@pytest.mark.nightly
def test_the_report_for_wrapt_shows_what_it_says():
    """When this fails, wrapt has the repair: see docs/upstream."""
    page = Path(__file__).parents[1] / "docs" / "upstream" / "wrapt-import-deadlock.md"
    (reproducer, _) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    for arguments, said in ((), "both wait\n"), (("--plain",), "both done\n"):
        command = [sys.executable, "-c", reproducer, *arguments]
        assert subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout == said
