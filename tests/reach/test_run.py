"""`megapatch run`: every Python below it brings megapatch in when, and only when, it imports a target."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import megapatch
from megapatch.reach import launch
from megapatch.reach.site.sitecustomize import HERE, TARGETS

PATCH = """
import functools
from megapatch import NEEDED, Patch, Site, Verdict

def louder(greet):
    @functools.wraps(greet)
    def replacement(name):
        return greet(name) + "!"
    return replacement

def patch(module):
    site = Site(module, lambda module: Verdict(NEEDED, "too quiet"), replace={"greet": louder})
    return Patch("acme." + module, "Greetings are loud.", upstream="", sites=(site,))

ONE, TWO = patch("greeter"), patch("greeter2")
"""
GREETER = "def greet(name): return 'hello ' + name\n"
PROGRAM = "import greeter; print(greeter.greet('you'))\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with two targets, patched by a third party; in a folder with a space."""
    folder = tmp_path_factory.mktemp("a") / "a project"
    info = folder / "acme-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[megapatch.patches]\ngreeter = acme:ONE\ngreeter2 = acme:TWO\n")
    files = {"acme": PATCH, "greeter": GREETER, "greeter2": GREETER, "program": PROGRAM, "children": CHILDREN}
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """The folder of a copy of megapatch, with a space in its name."""
    folder = tmp_path_factory.mktemp("b") / "a copy"
    source = Path(megapatch.__file__).parent
    shutil.copytree(source, folder / "megapatch", ignore=shutil.ignore_patterns("__pycache__", "testing"))
    return folder


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """The Python of an environment in which nothing is installed."""
    folder = tmp_path_factory.mktemp("c")
    venv.create(folder, symlinks=True)
    return str(folder / "bin" / "python")


def environment(*folders, **more):
    """This process's, with `folders` first on PYTHONPATH; an empty part would mean the working directory."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("MEGAPATCH_")}
    path = [*map(str, folders), *filter(None, known.get("PYTHONPATH", "").split(os.pathsep))]
    return {**known, "PYTHONPATH": os.pathsep.join(path), **more}


def below(*folders, **more):
    """The environment of what `megapatch run` starts."""
    return launch.reaching(environment(*folders, **more), {"greeter", "greeter2"})


def start(*command, env, **options):
    return subprocess.run(
        [str(word) for word in command],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def run(*command, env, **options):
    return start(sys.executable, "-m", "megapatch", "run", "--", *command, env=env, **options)


CHILDREN = """
import multiprocessing, subprocess, sys

def greet(channel):
    import greeter
    channel.send(greeter.greet("you"))

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        ours, theirs = context.Pipe()
        child = context.Process(target=greet, args=(theirs,))
        child.start()
        print(method, ours.recv())
        child.join()
    for how in (["program.py"], ["-m", "program"], ["-c", "import program"]):
        print(how[0], subprocess.run([sys.executable, *how], capture_output=True, text=True).stdout.strip())
    print([name for name in sys.modules if name.partition(".")[0] in ("megapatch", "wrapt", "greeter")])
"""


def test_every_kind_of_child_and_no_process_without_a_target(project, copied):
    env = environment(copied, project)
    shown = run(sys.executable, project / "children.py", env=env, cwd=project)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.splitlines() == [
        *(f"{how} hello you!" for how in ("spawn", "forkserver", "program.py", "-m", "-c")),
        "[]",
    ]
    assert start(sys.executable, project / "program.py", env=env).stdout == "hello you\n"


PROCESS = """
import os, signal, sys
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"interrupted\\n"))  # in the middle of a print, too
print(os.getpid(), sys.argv[1:], sys.stdin.readline().strip(), flush=True)
while True: signal.pause()
"""


def test_the_command_takes_the_place_of_the_process():
    words = ["--", "-h", "", "a b", "--json"]
    command = [sys.executable, "-m", "megapatch", "run", "--", sys.executable, "-c", PROCESS, *words]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=environment(), text=True, **pipes) as process:
        try:
            process.stdin.write("from standard input\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"{process.pid} {words} from standard input\n"
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == -signal.SIGTERM
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_exit_codes_and_signals_are_the_commands():
    assert run("sh", "-c", "exit 7", env=environment()).returncode == 7
    # Python ignores it; a command that inherits that writes into broken pipes.
    assert run("sh", "-c", "kill -PIPE $$; echo alive", env=environment()).returncode == -signal.SIGPIPE


def test_a_command_that_cannot_be_started(tmp_path):
    (tmp_path / "plain").write_text("echo\n")
    (tmp_path / "stray").write_text("#!/no/such/interpreter\n")
    (tmp_path / "bare").write_text("echo\n")
    for name in ("stray", "bare"):
        (tmp_path / name).chmod(0o755)
    commands = [
        [],
        [""],
        ["no-such-command"],
        *([f"./{name}"] for name in ("absent", "plain/x", "stray", "plain", "bare")),
    ]
    script = f"from megapatch.reach.launch import launch\nprint([launch(words) for words in {commands}])"
    shown = start(sys.executable, "-c", script, env=environment(), cwd=tmp_path)
    assert shown.stdout == "[2, 2, 127, 127, 127, 127, 126, 126]\n"
    told = shown.stderr.splitlines()
    assert told[0] == told[1]
    for line, sentence in zip(told[1:], [
        "Give a command after `--`, as in: megapatch run -- torchrun train.py",
        "no-such-command: no such command. Give a program on PATH, or the path of one.",
        "./absent: no such command. Give a program on PATH, or the path of one.",
        "./plain/x: no such command.",
        "./stray cannot be started: the interpreter in its first line is not there.",
        "./plain cannot be started: [Errno 13] Permission denied: './plain'. A script is started by",
        "./bare cannot be started: [Errno 8] Exec format error: './bare'. A script is started by",
    ], strict=True):  # fmt: skip
        assert line.startswith("megapatch run: ") and sentence in line


def test_pythonpath_keeps_what_it_held_and_gets_no_empty_part():
    def path(before):
        return launch.reaching(before, {"b", "a"})["PYTHONPATH"].split(os.pathsep)

    assert path({}) == path({"PYTHONPATH": ""}) == [HERE]
    assert path({"PYTHONPATH": "/a::/b"}) == [HERE, "/a", "", "/b"]
    assert path({"PYTHONPATH": f"/a{os.pathsep}{HERE}"}) == path({"PYTHONPATH": "/a"}) == [HERE, "/a"]
    assert launch.reaching({"OTHER": "1"}, {"b", "a"}) == {"OTHER": "1", "PYTHONPATH": HERE, TARGETS: "a,b"}


def test_the_targets_are_those_of_all_patches(project):
    inner = [sys.executable, "-m", "megapatch", "run", "--", "sh", "-c", f'echo "$PYTHONPATH"; echo "${TARGETS}"']
    path, targets = run(*inner, env=environment(project)).stdout.splitlines()
    assert path.split(os.pathsep)[:2] == [HERE, str(project)] and path.count(HERE) == 1
    assert {"greeter", "greeter2", "megatron.training.training"} < set(targets.split(","))


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
            "asked for\n" * 2 + "hello you\n",
        )  # once, by importlib and by ours
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
        "Keep what PYTHONPATH holds, as in PYTHONPATH=/new:$PYTHONPATH."
    )


def test_a_ray_command_says_that_its_job_is_out_of_reach(tmp_path):
    (tmp_path / "ray").write_text("print('submitted')")
    shown = start(sys.executable, tmp_path / "ray", "job", "submit", "--", "python", "train.py", env=below())
    assert shown.stdout == "submitted\n"
    assert shown.stderr.startswith("megapatch run: the job of this `ray job submit` is out of reach: the cluster")
    assert start(sys.executable, tmp_path / "ray", "job", "list", env=below()).stderr == ""


@pytest.mark.thorough
def test_torchrun_with_a_real_megatron(project):
    pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    script = project / "rank.py"
    script.write_text(
        "import os, megatron.core.distributed.distributed_data_parallel, sys\n"
        "told = {one.patch.name: one.status.value for one in sys.modules['megapatch'].report().patches}\n"
        "print('rank', os.environ['RANK'], told['megatron.forward-pre-hook'], flush=True)\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    shown = run(*torchrun, script, env=environment())
    assert shown.returncode == 0, shown.stderr
    assert sorted(line for line in shown.stdout.splitlines() if line.startswith("rank")) == [
        "rank 0 applied",
        "rank 1 applied",
    ]
    assert "megapatch run" not in shown.stderr
