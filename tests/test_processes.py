"""Forked children, and a process that ends while something is activated or imported."""

from __future__ import annotations

import pytest
from rigs.command import run
from rigs.engine import TARGET

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
