"""Processes below `megapatch run`: megapatch comes in when, and only when, they import a target."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from rigs.run import PROGRAM, below, environment, start

from megapatch.reach._run.site.sitecustomize import HERE, TARGETS

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
        f"megapatch run: greeter2 is imported by {stranger}, and nothing is patched in this process: megapatch is "
        "not installed there. Install it, or put its checkout on PYTHONPATH.\n"
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
    for folder, why in (
        (copied, "ModuleNotFoundError: No module named 'wrapt'"),
        (tmp_path, "ValueError: broken"),
    ):
        env = {**below(project), "PYTHONPATH": os.pathsep.join([HERE, str(folder), str(project)])}
        shown = start(stranger, "-c", ASKED + PROGRAM, env=env)
        assert (shown.returncode, shown.stdout) == (
            0,
            "asked for\nhello you\n",  # once; by ours, which stands in front again
        )
        (line,) = shown.stderr.splitlines()
        assert line.endswith(f"nothing is patched in this process: megapatch cannot be imported there ({why}).")
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


WATCHED = """
import inspect, os, subprocess, sys
python = [sys.executable, "-c", "pass"]
subprocess.run(["true"], env={})
subprocess.run(python)
subprocess.run(python, env=os.environb)
init = subprocess.Popen.__init__
print(str(inspect.signature(subprocess.Popen))[:5], init.__name__, type(subprocess.__loader__).__name__)
for wrong in ([], [1]):
    try: subprocess.Popen(wrong)
    except (IndexError, TypeError) as error: print(type(error).__name__)
for _ in range(2): subprocess.run(args=python, env={"PYTHONPATH": "/new"})
"""


@pytest.mark.parametrize("loaded_before", [False, True])
def test_a_process_says_once_that_its_children_are_cut_off(stranger, loaded_before):
    if loaded_before:  # by what is installed, before sitecustomize
        (packages,) = Path(stranger).parent.parent.glob("lib/python*/site-packages")
        (packages / "early.pth").write_text("import subprocess\n")
    shown = start(stranger, "-c", WATCHED, env=below())
    assert (shown.returncode, shown.stdout) == (0, "(args __init__ SourceFileLoader\nIndexError\nTypeError\n")
    (line,) = shown.stderr.splitlines()
    assert line.startswith("megapatch run: process ")
    assert line.endswith(
        f"starts `{stranger} -c pass` with PYTHONPATH=/new: megapatch is not active there. "
        "Keep the old value, as in PYTHONPATH=/new:$PYTHONPATH."
    )


def test_a_ray_command_says_that_its_job_is_out_of_reach(tmp_path):
    (tmp_path / "ray").write_text("print('submitted')")
    shown = start(sys.executable, tmp_path / "ray", "job", "submit", "--", "python", "train.py", env=below())
    assert shown.stdout == "submitted\n"
    assert shown.stderr.startswith("megapatch run: the job of this `ray job submit` is out of reach: the cluster")
    assert start(sys.executable, tmp_path / "ray", "job", "list", env=below()).stderr == ""


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


@pytest.mark.parametrize(
    "call",
    [
        "os.system(f'{python} -I -c pass')",
        "os.system(command=f'true; env -u PYTHONPATH {python} -c pass')",
        "os.popen(f'{python} -I -c pass').read()",
        "os.execv(python, [python, '-I', '-c', 'pass'])",
        "os.execvpe(python, [python, '-c', 'pass'], {})",
        "os.execlp(python, python, '-I', '-c', 'pass')",
        "os.spawnv(os.P_WAIT, python, [python, '-I', '-c', 'pass'])",
        "os.waitpid(os.posix_spawn(python, [python, '-c', 'pass'], {'PYTHONPATH': '/new'}), 0)",
        "os.waitpid(os.posix_spawnp(python, [python, '-I', '-c', 'pass'], os.environ), 0)",
    ],
)
def test_whatever_starts_a_process_is_looked_at(stranger, call):
    script = f"import os, sys\npython = sys.executable\n{call}\n"
    shown = start(stranger, "-c", script, env=below())
    (line,) = shown.stderr.splitlines()
    assert shown.returncode == 0 and "megapatch is not active there" in line


ALIKE = """
import os, pickle, inspect
assert pickle.loads(pickle.dumps(os.system)) is os.system and os.system.__name__ == "system"
assert str(inspect.signature(os.execve)) == "(path, argv, env)", inspect.signature(os.execve)
assert os.execve in os.supports_fd
assert os.system("exit 3") >> 8 == 3
for wrong in (lambda: os.system(), lambda: os.system(1), lambda: os.execv("/no/such", ["x"]), lambda: os.execv(1)):
    try: wrong()
    except (TypeError, FileNotFoundError) as error: print(type(error).__name__)
import sys
print([name for name in ("logging", "torch", "megapatch") if name in sys.modules])
"""


def test_functions_that_are_looked_at_do_what_they_did(stranger):
    shown = start(stranger, "-c", ALIKE, env=below())
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.splitlines() == ["TypeError", "TypeError", "FileNotFoundError", "TypeError", "[]"]


FORGES = r"""
import os, sys
words = [sys.executable, "-c", "pass", "--api-key=hunter2"]
os.execve(sys.executable, words, {"PYTHONPATH": "/new\x1b[31m\nall well"})
"""


def test_what_it_says_has_no_secret_and_no_line_of_others(stranger, tmp_path):
    (tmp_path / "logging.py").write_text("raise SystemExit('not asked for')")
    shown = start(stranger, "-c", FORGES, env=below(), cwd=tmp_path)
    assert "megapatch is not active there" in shown.stderr and "\\x1b[31m\n  all well" in shown.stderr
    assert "hunter2" not in shown.stderr and "not asked for" not in shown.stderr
