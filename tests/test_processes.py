"""Forked children, and a process that ends while something is activated or imported."""

from __future__ import annotations

import pytest
from rigs.command import run
from rigs.engine import TARGET

RIG = """
import importlib, os, sys, threading, warnings
warnings.simplefilter("ignore")  # that a process with threads is forked is the point
import {rig}
from {rig} import TARGET, make_engine, make_patch, needed, status_of
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

# A thread stands still in the middle of something while another one forks.
WHILE_FORKED = """
first, second, third = {names!r}
stopping = []

def diagnose(module):
    if "diagnose" in stopping:
        stop_at("diagnose")
    return needed(module)

from megapatch._engine import holders
find = holders.find
def slow_find(*args):
    if "find" in stopping:
        stop_at("find")
    return find(*args)
holders.find = slow_find

from megapatch._engine import rebuilt
install_rebuilt = rebuilt.RebuiltTarget.install
def slow_install(self):
    if "rebuild" in stopping:
        stop_at("rebuild")
    install_rebuilt(self)
rebuilt.RebuiltTarget.install = slow_install

engine = make_engine(
    make_patch(first, "greet", "Greeter.greet", diagnose=diagnose, name="test.first"),
    make_patch(second, "greet", "Greeter.greet", name="test.second"),
    make_patch(third, "greet", name="test.third"),
)
object.__setattr__(engine.records[0].site, "rebuild", lambda module: {{first + ":TABLE": dict}})
os.register_at_fork(after_in_child=engine.after_fork)
engine.activate()

def whole(module):
    greetings = {{module.greet("you"), module.alias("you"), module.Greeter().greet("you")}}
    assert len(greetings) == 1, greetings
    return greetings == {{"hello you!"}}

for place in ("diagnose", "rebuild", "find", "restore"):
    target = importlib.import_module(first)
    engine.restore("test.first")
    if place == "restore":
        engine.apply()
    reached.clear(), go_on.clear()
    stopping.append("find" if place == "restore" else place)
    thread = in_thread(engine.restore if place == "restore" else engine.apply)
    stopping.clear()

    def child():
        go_on.set()
        assert whole(target), place  # what the other thread had begun has been finished here
        assert make_report(engine.records).patches[0].status.value == "applied", place
        assert importlib.import_module(second).greet("you") == "hello you!"
        engine.apply()
        engine.restore()
        assert not whole(target)

    fork(child)
    go_on.set()
    thread.join(20)
    assert whole(target) == (place != "restore"), place
    engine.apply()

# Another thread is importing a target: Python itself cannot import that one in the child, everything else works.
import {gate} as gate
gate.stop_at = stop_at
reached.clear(), go_on.clear()
thread = in_thread(importlib.import_module, third)

def child():
    engine.activate()
    engine.apply()
    assert make_report(engine.records).patches[2].status.value == "pending"
    assert importlib.import_module(second).greet("you") == "hello you!"

fork(child)
go_on.set()
thread.join(20)
assert sys.modules[third].greet("you") == "hello you!"
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


def test_a_fork_while_another_thread_is_in_the_middle_of_something(modules, script, path):
    source = "from rigs.engine import TARGET\nexec(TARGET)\nalias = greet\nTABLE = {{}}\n".replace("{{}}", "{}")
    gate = modules.write("", stem="gate")
    names = [modules.write(source), modules.write(source)]
    names.append(modules.write(f"import {gate}\n{gate}.stop_at('import')\n" + source))
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
