"""Processes below `megapatch run`: megapatch comes in when, and only when, they import a target."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

from rigs.run import PROGRAM, below, environment, start

from megapatch.reach._run.site.sitecustomize import HERE, TARGETS
from megapatch.reach._run.site.sitecustomize import __file__ as FILE

# The pauses below are for a wrong program, to go wrong in: a right one passes however long they are.
THREADS = """
import importlib, sys, threading, time
class Slow:  # while one thread looks for megapatch, the other has time to import without it
    def find_spec(name, path, target):
        if name == "megapatch": time.sleep(0.1)
sys.meta_path.insert(0, Slow)
barrier, heard = threading.Barrier(2), {}
def hear(name):
    barrier.wait()
    heard[name] = importlib.import_module(name).greet("you")
threads = [threading.Thread(target=hear, args=(name,)) for name in ("greeter", "greeter2")]
[thread.start() for thread in threads], [thread.join() for thread in threads]
print(sorted(heard.items()))
"""


def test_two_threads_that_import_targets_at_once(project):
    shown = start(sys.executable, "-c", THREADS, env=below(project))
    assert shown.stdout == "[('greeter', 'hello you!'), ('greeter2', 'hello you!')]\n"
    assert shown.stderr == ""


def test_a_thread_that_loads_what_megapatch_needs_is_no_deadlock(project, tmp_path):
    (tmp_path / "megapatch").mkdir()
    (tmp_path / "megapatch" / "__init__.py").write_text("import half")
    (tmp_path / "half.py").write_text("import sys, time; sys.half_way.set(); time.sleep(0.2); import colorsys")
    script = """
import sys, threading
sys.half_way = threading.Event()
thread = threading.Thread(target=__import__, args=("half",), daemon=True)
thread.start(), sys.half_way.wait()
import greeter
thread.join(), print("done")
"""
    assert start(sys.executable, "-c", script, env=below(tmp_path, project)).stdout == "done\n"


def test_looking_for_a_target_is_no_import_of_it_and_a_program_may_import_megapatch_itself(project):
    script = (
        "import importlib.util, sys; print(importlib.util.find_spec('greeter').origin, 'megapatch' in sys.modules)"
    )
    shown = start(sys.executable, "-c", f"{script}\nimport megapatch\n{PROGRAM}", env=below(project))
    assert (shown.stdout, shown.stderr) == (f"{project / 'greeter.py'} False\nhello you!\n", "")


SHADOWED = "import sys; sys.shadowed = 'was here'; import greeter; sys.greeting = greeter.greet('you')\n"


def test_the_sitecustomize_that_it_shadows_runs(project, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SHADOWED)
    script = "import sys, sitecustomize; print(sitecustomize.__file__, sys.shadowed, sys.greeting, sys.path[1])"
    shown = start(sys.executable, "-c", script, env=below(tmp_path, project))
    assert shown.stdout == f"{tmp_path / 'sitecustomize.py'} was here hello you! {HERE}\n"
    assert shown.stderr == ""


def test_a_shadowed_sitecustomize_that_raises(project, tmp_path):
    script = "import sys, greeter; print('sitecustomize' in sys.modules, greeter.greet('you'))"
    for raising in ("raise ValueError('no')", "import no_such_module", "raise SystemExit(3)"):
        (tmp_path / "sitecustomize.py").write_text(raising)
        plain = start(sys.executable, "-c", script, env=environment(tmp_path, project))
        shown = start(sys.executable, "-c", script, env=below(tmp_path, project))
        assert shown.returncode == plain.returncode
        assert shown.stderr.splitlines()[-1] == plain.stderr.splitlines()[-1]  # Python's own words
        assert shown.stdout == plain.stdout.replace("you", "you!")


def test_an_environment_without_megapatch(project, stranger, tmp_path):
    (tmp_path / "megapatch.py").write_text("raise SystemExit('megapatch is from the working directory')")
    env = {**below(project), "PYTHONPATH": f"{HERE}{os.pathsep}{project}"}
    shown = start(stranger, "-c", "import greeter2\n" + PROGRAM, env=env, cwd=tmp_path)
    assert (shown.returncode, shown.stdout) == (0, "hello you\n")
    assert shown.stderr == (
        f"megapatch run: greeter2 is imported by {stranger}, and nothing is patched in this process: import "
        "megapatch raises ModuleNotFoundError there. Install megapatch, or put its checkout on PYTHONPATH.\n"
    )


ASKED = """
import sys
class Tells:
    def find_spec(name, path, target):
        if name == "megapatch": print("asked for")
sys.meta_path.insert(0, Tells)
import greeter2
"""


def test_a_megapatch_that_cannot_be_imported(project, copied, stranger, tmp_path):
    (tmp_path / "megapatch").mkdir()
    (tmp_path / "megapatch" / "__init__.py").write_text("raise ValueError('broken')")
    for folder, error in ((copied, "ModuleNotFoundError"), (tmp_path, "ValueError")):
        env = {**below(project), "PYTHONPATH": os.pathsep.join([HERE, str(folder), str(project)])}
        shown = start(stranger, "-c", ASKED + PROGRAM, env=env)
        assert (shown.returncode, shown.stdout) == (
            0,
            "asked for\nhello you\n",  # once; by ours, which stands in front again
        )
        (line,) = shown.stderr.splitlines()
        assert f"nothing is patched in this process: import megapatch raises {error} there. " in line
    closed = start("sh", "-c", f'"{stranger}" -c "import greeter2" 2>&-; echo $?', env=env)
    assert closed.stdout == "0\n"


def test_strict_stays_strict(project):
    script = "import sys, types; sys.modules['greeter'] = types.ModuleType('greeter')\ntry: import greeter2\n"
    script += "except Exception as error: print(type(error).__name__)\nimport greeter2"
    shown = start(sys.executable, "-c", script, env=below(project, MEGAPATCH_STRICT="1"))
    assert (shown.returncode, shown.stdout) == (1, "StrictError\n")
    assert "StrictError: acme.greeter is failed" in shown.stderr


def test_nothing_comes_from_the_working_directory_or_from_next_to_the_script(project, tmp_path):
    for name in ("megapatch", "wrapt", "packaging", "sitecustomize", "logging", "fnmatch", "dataclasses"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} is from the working directory')")
    (tmp_path / "script.py").write_text(PROGRAM)
    for command in (["-c", PROGRAM], ["script.py"]):
        shown = start(sys.executable, *command, env=below(project), cwd=tmp_path)
        assert (shown.returncode, shown.stdout, shown.stderr) == (0, "hello you!\n", "")
    shown = start(sys.executable, "-c", PROGRAM + "import wrapt", env=below(project), cwd=tmp_path)
    assert shown.returncode == 0  # it is loaded
    shown = start(sys.executable, "-c", "import wrapt", env=below(project), cwd=tmp_path)
    assert "wrapt is from the working directory" in shown.stderr  # as without megapatch


def test_where_only_the_folder_has_come_through_it_says_so(project):
    env = below(project)
    del env[TARGETS]
    shown = start(sys.executable, "-c", PROGRAM, env=env)
    assert (shown.returncode, shown.stdout) == (0, "hello you\n")
    assert f"{TARGETS} is not set" in shown.stderr and len(shown.stderr.splitlines()) == 1


def test_under_another_name_the_private_file_does_nothing():
    assert "FirstTarget" not in map(lambda finder: type(finder).__name__, sys.meta_path)
    assert HERE not in sys.path


LOADS_ITSELF = """
import sys
from importlib.machinery import PathFinder
class LoadsItself:
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, path, target) if name == "greeter" else None
sys.meta_path.insert(0, LoadsItself)
"""


def test_behind_a_later_import_hook_the_next_import_brings_megapatch(project):
    script = LOADS_ITSELF + PROGRAM + "import colorsys\nprint(greeter.greet('you'))"
    shown = start(sys.executable, "-c", script, env=below(project))
    assert (shown.stdout, shown.stderr) == ("hello you\nhello you!\n", "")
    shown = start(sys.executable, "-c", LOADS_ITSELF + "import colorsys\n" + PROGRAM, env=below(project))
    assert (shown.stdout, shown.stderr) == ("hello you!\n", "")


def test_every_python_3_can_read_what_is_injected():
    tree = ast.parse(Path(FILE).read_text(), feature_version=(3, 4))
    newer = ast.JoinedStr | ast.AnnAssign | ast.Starred | ast.NamedExpr | ast.AsyncFunctionDef | ast.arg
    found = [node for node in ast.walk(tree) if isinstance(node, newer) and getattr(node, "annotation", True)]
    assert not [f"line {node.lineno}" for node in found]


def test_a_python_that_is_too_old_runs_its_own_sitecustomize_only(project, stranger, tmp_path):
    (packages,) = Path(stranger).parent.parent.glob("lib/python*/site-packages")
    (packages / "old.pth").write_text("import sys; sys.version_info = (3, 8, 18)\n")
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.shadowed = 'was here'\n")
    script = f"import sys; print(sys.shadowed, [type(finder) for finder in sys.meta_path])\n{PROGRAM}"
    shown = start(stranger, "-c", script, env=below(tmp_path, project))
    (packages / "old.pth").unlink()
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("was here [<class 'type'>") and shown.stdout.endswith("\nhello you\n")
