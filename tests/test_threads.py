"""Threads that import, diagnose and apply at once; forked children, and a process that ends meanwhile."""

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
from rigs.command import run
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
    done = run("-c", AT_ONCE, *packages, path=f"{tmp_path}{os.pathsep}{Path(__file__).parent}")
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


# ------------------------------------------------------------------------ processes
RIG = """
import importlib, os, sys, threading, warnings
warnings.simplefilter("ignore")  # that a process with threads is forked is the point
from {rig} import make_engine, make_patch
from megapatch._reporting.report import make_report

def fork(child):
    pid = os.fork()
    if pid == 0:
        import faulthandler
        faulthandler.dump_traceback_later(20, exit=True)
        try:
            child()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, code

def stop_at(place):
    reached.set()
    assert go_on.wait(20), place

reached, go_on = threading.Event(), threading.Event()
def in_thread(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    assert reached.wait(20)
    return thread
"""

# Another thread is importing a target: Python itself cannot import that one in the child, everything else works.
WHILE_FORKED = """
from megapatch._engine import watch

first, second = {names!r}
engine = make_engine(make_patch(first, "greet", name="test.first"), make_patch(second, name="test.second"))
os.register_at_fork(after_in_child=watch.after_fork)
engine.activate()
import {gate} as gate
gate.stop_at = stop_at
thread = in_thread(importlib.import_module, first)

def child():
    engine.activate()
    engine.apply()
    assert make_report(engine.records).patches[0].status.value == "pending"
    assert importlib.import_module(second).greet("you") == "hello you!"

fork(child)
go_on.set()
thread.join(20)
assert sys.modules[first].greet("you") == "hello you!"
print("fine")
"""


@pytest.fixture
def script(modules, pytestconfig):
    def write(text, **names):
        return RIG.format(rig="rigs.engine") + text.format(**names)

    return write


@pytest.fixture
def path(modules, pytestconfig):
    return f"{modules.folder}:{pytestconfig.rootpath / 'tests'}"


def test_a_fork_while_another_thread_is_importing(modules, script, path):
    gate = modules.write("", stem="gate")
    names = [modules.write(f"import {gate}\n{gate}.stop_at('import')\n" + TARGET), modules.write(TARGET)]
    shown = run("-c", script(WHILE_FORKED, names=names, gate=gate), path=path)
    assert (shown.stdout, shown.returncode) == ("fine\n", 0), shown.stderr


# A daemon thread imports targets again and again, and activates, while the process ends.
WHILE_ENDING = """
import atexit

name, under_way = {name!r}, threading.Event()
engine = make_engine(make_patch(name, "greet", "Greeter.greet"))
engine.activate()

def again():
    while True:
        sys.modules.pop(name, None)
        importlib.import_module(name)
        engine.apply()
        engine.restore()
        under_way.set()

def at_exit():
    importlib.import_module({other!r})
    import megapatch
    megapatch.apply()
    str(megapatch.report())
    megapatch.restore()
    print("at exit", end=" ")

atexit.register(at_exit)
threading.Thread(target=again, daemon=True).start()
under_way.wait()
sys.exit(3)
"""

FROM_ATEXIT = """
import atexit, sys

def at_exit():
    import megapatch
    import megatron.core.distributed.distributed_data_parallel
    print(*{patch.patch.family for patch in megapatch.report().patches} & {"megatron"})
    megapatch.restore()

atexit.register(at_exit)
sys.exit(3)
"""


def test_a_process_that_ends_meanwhile(modules, script, path):
    text = script(WHILE_ENDING, name=modules.write(TARGET), other=modules.write(TARGET, stem="other"))
    for _ in range(2):  # where it is at the end is a matter of chance
        shown = run("-c", text, path=path)
        assert (shown.returncode, shown.stdout.strip()) == (3, "at exit"), shown.stderr
        assert "Traceback" not in shown.stderr and "Exception" not in shown.stderr


def test_activating_when_a_process_ends(fake_megatron):
    source = "class DistributedDataParallel: ...\n"
    shown = run("-c", FROM_ATEXIT, path=fake_megatron(source), MEGAPATCH_DISABLE="*")
    assert (shown.returncode, shown.stdout, shown.stderr) == (3, "megatron\n", "")
