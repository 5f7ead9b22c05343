"""megapatch neither reads nor runs anything in the working directory, or that was switched off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import megapatch

DDP = "megatron.core.distributed.distributed_data_parallel"
TELLS = "print('the entry point was loaded')\nPATCHES = ()\n"
LOOK = (
    "from megapatch._engine.engine import this_process\n"
    f"print([one.name for one in this_process().roster.unloaded if not one.names_are_known])\nimport {DDP}"
)
SITE = str(Path(megapatch.__file__).parents[1])
WRAPT = str(Path(sys.modules["wrapt"].__file__).parents[1])
PACKAGING = str(Path(__import__("packaging").__file__).parents[1])


@pytest.fixture
def lying_about(fake_megatron):
    """A folder with a megatron, and with the metadata of a distribution that patches it."""
    folder = fake_megatron("class DistributedDataParallel: ...\n")
    for info in ("evil-1.0.dist-info", "old.egg-info"):
        (folder / info).mkdir()
        (folder / info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
        (folder / info / "entry_points.txt").write_text(f"[megapatch.patches]\n{DDP} = evil:PATCHES\n")
    (folder / "evil.py").write_text(TELLS)
    (folder / "script.py").write_text(LOOK)
    return folder


def python(*arguments, cwd, path=(), **environment):
    known = {name: value for name, value in os.environ.items() if not name.startswith(("MEGAPATCH_", "PYTHON"))}
    search = os.pathsep.join([*map(str, path), *dict.fromkeys((SITE, WRAPT, PACKAGING))])
    shown = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**known, "PYTHONPATH": search, "MEGAPATCH_DISABLE": "*.*-*", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return shown.stdout + shown.stderr


@pytest.mark.parametrize("way", [("-c", LOOK), ("-m", "script"), ("script.py",)])
def test_metadata_in_the_working_directory_or_the_scripts_folder_is_not_asked_for(lying_about, way):
    assert python(*way, cwd=lying_about) == "[]\n"


IN_CHILDREN = """
import multiprocessing, sys
from megapatch._engine.engine import this_process

def look():
    print([entry.name for entry in this_process().roster.unloaded if not entry.names_are_known])

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=look)
    process.start()
    process.join()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_nor_is_it_in_the_processes_of_multiprocessing(lying_about, method):
    (lying_about / "children.py").write_text(IN_CHILDREN)
    assert python(str(lying_about / "children.py"), method, cwd="/") == "[]\n"


STARTS = """
import importlib.util, multiprocessing, os, sys
spec = importlib.util.spec_from_file_location("_server", sys.argv[1])  # without its package, which imports torch
_server = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_server)

def start(method):
    with _server.nothing_of_the_caller():
        process = multiprocessing.get_context(method).Process(target=print, args=(method, "works"))
        process.start()
    process.join()

if __name__ == "__main__":
    _server._PRELOADED[:] = ["preloaded"]
    with _server.server_of_a_program():
        start("forkserver")
        print(os.getcwd())
        if sys.version_info >= (3, 11):
            start("spawn")
"""


def test_nor_is_a_file_of_the_working_directory_run_in_the_processes_that_are_started(tmp_path):
    """The resource tracker, the server, what it preloads, and the ranks."""
    (tmp_path / "start.py").write_text(STARTS)
    (lying_about := tmp_path / "cwd").mkdir()
    tells = "import sys; sys.stderr.write(f'{__name__} was run\\n'); raise ImportError"
    for name in ("signal", "socket", "selectors", "struct", "threading", "pickle", "preloaded"):
        (lying_about / f"{name}.py").write_text(tells)
    works = ["forkserver works", str(lying_about), *["spawn works"] * (sys.version_info >= (3, 11))]
    server = Path(megapatch.__file__).parent / "testing/_server.py"
    assert python(str(tmp_path / "start.py"), str(server), cwd=lying_about).splitlines() == works


def test_nor_for_a_script_that_is_started_through_a_symlink(lying_about, tmp_path_factory):
    link = tmp_path_factory.mktemp("bin") / "link.py"
    link.symlink_to(lying_about / "script.py")
    assert python(str(link), cwd="/") == "[]\n"


def test_nor_for_a_module_that_changes_the_working_directory_first(lying_about):
    package = lying_about / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "mod.py").write_text(f"import os\nos.chdir('/')\n{LOOK}")
    assert python("-m", "pkg.mod", cwd=lying_about) == "[]\n"


def test_a_folder_that_the_program_appends_is_asked_for(lying_about):
    appended = f"import sys\nsys.path.append({str(lying_about)!r})\n{LOOK}"
    assert "third_party.evil" in python("-c", appended, cwd="/")


def test_an_empty_entry_of_pythonpath_is_no_request(lying_about):
    assert python("-c", LOOK, cwd=lying_about, path=[""]) == "[]\n"


@pytest.mark.parametrize("named", [".", "absolute"])
def test_what_pythonpath_names_is_asked_for(lying_about, named):
    shown = python("-c", LOOK, cwd=lying_about, path=[named if named == "." else lying_about])
    assert "third_party.evil" in shown and shown.count("the entry point was loaded") == 1


def test_switched_off_no_entry_point_is_read_or_loaded(lying_about):
    environment = {"path": [lying_about], "MEGAPATCH_NO_ENTRY_POINTS": "1"}
    watched = f"""
import sys
sys.addaudithook(lambda event, args: "entry_points.txt" in str(args[:1]) and event == "open" and print(args[0]))
{LOOK}
"""
    assert python("-c", watched, cwd="/", **environment) == "[]\n"
    del environment["MEGAPATCH_NO_ENTRY_POINTS"]
    assert "entry_points.txt" in python("-c", watched, cwd="/", **environment)


def test_the_command_line_runs_nothing_of_the_working_directory(lying_about):
    for name in ("wrapt", "packaging", "megapatch", "torch", "sitecustomize"):
        (lying_about / f"{name}.py").write_text("raise SystemExit('not asked for')\n")
    script = lying_about / "bin" / "megapatch"  # as pip writes it
    script.parent.mkdir()
    script.write_text("import sys\nfrom megapatch._cli.main import main\nsys.exit(main())\n")
    for command in (["list"], ["explain", "megatron.*"], ["doctor", "--no-import"]):
        shown = python(str(script), *command, cwd=lying_about)
        assert "megatron." in shown and "not asked for" not in shown


def test_importing_megapatch_opens_no_file_to_write_and_starts_nothing(lying_about):
    events = ("subprocess.Popen", "os.system", "os.exec", "socket.connect", "exec.dynamic")
    watched = f"""
import sys
def hook(event, args):
    writing = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if writing or event in {events!r}:
        print(event, args)
sys.dont_write_bytecode = True
sys.addaudithook(hook)
import megapatch, {DDP}
megapatch.report()
"""
    assert python("-c", watched, cwd=lying_about) == ""
